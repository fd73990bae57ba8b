{{/* What the schema cannot say: fields that contradict each other. */}}
{{- define "hw.checks" -}}
{{- if ne .Values.autoscaling.type "none" -}}
{{- if not (include "hw.usesLws" .) -}}
{{- fail (printf "autoscaling.type is %q and groups run as StatefulSets, want worker.workload LeaderWorkerSet: only it can be scaled by groups" .Values.autoscaling.type) -}}
{{- end -}}
{{- if .Values.cache.perGroup -}}
{{- fail "autoscaling.type is set and cache.perGroup is true, want cache.perGroup false: a cache service for each group does not come and go with it" -}}
{{- end -}}
{{- if gt (int .Values.autoscaling.minGroups) (int .Values.autoscaling.maxGroups) -}}
{{- fail (printf "autoscaling.minGroups is %d and maxGroups is %d, want minGroups <= maxGroups" (int .Values.autoscaling.minGroups) (int .Values.autoscaling.maxGroups)) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.cache.config.redis_address .Values.networkPolicy.enabled (not .Values.networkPolicy.extraEgress) -}}
{{- fail (printf "cache.config.redis_address is %q and the network policy lets nothing out to it, want networkPolicy.extraEgress" .Values.cache.config.redis_address) -}}
{{- end -}}
{{- if and .Values.cache.config.etcd_endpoints .Values.networkPolicy.enabled (not .Values.networkPolicy.extraEgress) -}}
{{- fail (printf "cache.config.etcd_endpoints is %q and the network policy lets nothing out to it, want networkPolicy.extraEgress" .Values.cache.config.etcd_endpoints) -}}
{{- end -}}
{{- $addresses := dict "redis" "redis_address" "etcd" "etcd_endpoints" -}}
{{- range $store, $field := $addresses -}}
{{- $part := index $.Values.cache $store -}}
{{- $address := index $.Values.cache.config $field | default "" -}}
{{- $password := index $.Values.cache.config (printf "%s_password_file" $store) -}}
{{- $authority := index $.Values.cache.config (printf "%s_ca_file" $store) -}}
{{- if and $password (not $authority) (not (and $part.secretName $part.tls)) -}}
{{- fail (printf "cache.config.%s_password_file is %q and %s has no TLS: the password would go to %s in plaintext, want cache.config.%s_ca_file, or the secret of cache.%s" $store $password $store $address $store $store) -}}
{{- end -}}
{{- if and $part.secretName (not $address) -}}
{{- fail (printf "cache.%s.secretName is %q and cache.config.%s is empty, want that, too" $store $part.secretName $field) -}}
{{- end -}}
{{- if and $part.secretName $part.password (not $part.tls) -}}
{{- fail (printf "cache.%s.password is true and cache.%s.tls is false: the password would go to %s in plaintext, want cache.%s.tls true" $store $store $address $store) -}}
{{- end -}}
{{- if and $part.secretName $part.clientCertificate (not $part.tls) -}}
{{- fail (printf "cache.%s.clientCertificate is true and cache.%s.tls is false, want cache.%s.tls true" $store $store $store) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.cache.etcd.secretName .Values.cache.etcd.password (not .Values.cache.config.etcd_user) -}}
{{- fail "cache.etcd.password is true and cache.config.etcd_user is empty, want the user whose password it is" -}}
{{- end -}}
{{- if and .Values.tls.enabled (not .Values.tls.secretName) -}}
{{- fail "tls.enabled is true and tls.secretName is empty, want the secret with tls.crt, tls.key and ca.crt" -}}
{{- end -}}
{{- if and .Values.tokens.secretName (not .Values.tls.enabled) -}}
{{- fail (printf "tokens.secretName is %q and tls.enabled is false: tokens would go in plaintext, want tls.enabled true" .Values.tokens.secretName) -}}
{{- end -}}
{{- if and (eq .Values.ipFamily "IPv6") .Values.monitoring.serviceMonitor.enabled -}}
{{- fail "ipFamily is IPv6 and monitoring.serviceMonitor.enabled is true: the metrics endpoints bind to IPv4 alone, want ipFamily IPv4 (also on dual-stack clusters)" -}}
{{- end -}}
{{- end }}
