{{/* The typed configuration of each binary: what the chart decides wins over `config`, where the
     schema refuses those fields anyway. */}}
{{/* Where the secrets are mounted, for servers of both kinds. */}}
{{- define "hw.securityConfig" -}}
{{- if .Values.tls.enabled }}
tls_cert_file: /etc/heavywater-tls/tls.crt
tls_key_file: /etc/heavywater-tls/tls.key
{{- if .Values.tls.clientCertificates }}
tls_client_ca_file: /etc/heavywater-tls/ca.crt
{{- end }}
{{- else }}
allow_plaintext: true
{{- end }}
{{- if .Values.tokens.secretName }}
tokens_file: /etc/heavywater-tokens/tokens
{{- end }}
{{- end }}

{{/* Files of the secrets for Redis and etcd: (dict "name" "redis" "part" .Values.cache.redis). */}}
{{- define "hw.storeConfig" -}}
{{- if .part.secretName }}
{{- if .part.password }}
{{ .name }}_password_file: /etc/heavywater-{{ .name }}/password
{{- end }}
{{- if .part.tls }}
{{ .name }}_ca_file: /etc/heavywater-{{ .name }}/ca.crt
{{- end }}
{{- if .part.clientCertificate }}
{{ .name }}_cert_file: /etc/heavywater-{{ .name }}/tls.crt
{{ .name }}_key_file: /etc/heavywater-{{ .name }}/tls.key
{{- end }}
{{- end }}
{{- end }}

{{- define "hw.cacheConfig" -}}
{{- $own := dict
  "listen_address" (printf "%s:7700" (include "hw.anyAddress" .))
  "metrics_address" "0.0.0.0:9400"
  "disable_slab" (eq .Values.sharedMemory.mode "none")
  "state_dir" (ternary "/var/lib/heavywater/state" "" (and .Values.cache.keepState (eq .Values.sharedMemory.mode "hostPath")))
  "disk_path" (ternary "/var/lib/heavywater/pages" "" .Values.cache.disk.enabled) -}}
{{- $redis := include "hw.storeConfig" (dict "name" "redis" "part" .Values.cache.redis) | fromYaml -}}
{{- $etcd := include "hw.storeConfig" (dict "name" "etcd" "part" .Values.cache.etcd) | fromYaml -}}
{{- toYaml (mergeOverwrite (deepCopy .Values.cache.config) $own $redis $etcd (include "hw.securityConfig" . | fromYaml)) -}}
{{- end }}

{{- define "hw.workerConfig" -}}
{{- $own := dict
  "size" .Values.worker.ranks
  "model" .Values.worker.model.path
  "listen_address" (printf "%s:7701" (include "hw.anyAddress" .))
  "metrics_address" "0.0.0.0:9401"
  "comm_interface" .Values.worker.interface
  "disable_slab" (eq .Values.sharedMemory.mode "none") -}}
{{- if .Values.tls.enabled -}}
{{- $own = mergeOverwrite $own (dict "tls_ca_file" "/etc/heavywater-tls/ca.crt" "tls_server_name" .Values.tls.serverName) -}}
{{- end -}}
{{- if .Values.tokens.secretName -}}
{{- $own = mergeOverwrite $own (dict "token_file" "/etc/heavywater-tokens/worker") -}}
{{- end -}}
{{- toYaml (mergeOverwrite (deepCopy .Values.worker.config) $own (include "hw.securityConfig" . | fromYaml)) -}}
{{- end }}

{{/* Seconds until a pod may be killed: (dict "part" .Values.cache "name" "cache"). The 15 s are what
     the servers take beyond the drain: calls that are cancelled, reports, the group's end. */}}
{{- define "hw.gracePeriod" -}}
{{- $drain := int64 (default 5000 .part.config.drain_ms) -}}
{{- $needs := add (int64 .part.preStopSeconds) (div (add $drain 999) 1000) -}}
{{- $given := int64 .part.terminationGracePeriodSeconds -}}
{{- if and $given (le $given $needs) -}}
{{- fail (printf "%s.terminationGracePeriodSeconds is %d, want more than %d: preStopSeconds and config.drain_ms" .name $given $needs) -}}
{{- end -}}
{{- if $given -}}{{ $given }}{{- else -}}{{ add $needs 15 }}{{- end -}}
{{- end }}

{{- define "hw.cacheMemory" -}}
{{ add (int64 (default 1073741824 .Values.cache.config.host_bytes)) (int64 .Values.cache.overheadBytes) }}
{{- end }}

{{- define "hw.cacheReplicas" -}}
{{ ternary .Values.worker.groups 1 .Values.cache.perGroup }}
{{- end }}
