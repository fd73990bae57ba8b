{{- define "hw.name" -}}
{{ default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- define "hw.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{ .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else if contains (include "hw.name" .) .Release.Name -}}
{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-%s" .Release.Name (include "hw.name" .) | trunc 40 | trimSuffix "-" }}
{{- end -}}
{{- end }}

{{- define "hw.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{ default (include "hw.fullname" .) .Values.serviceAccount.name }}
{{- else -}}
{{ default "default" .Values.serviceAccount.name }}
{{- end -}}
{{- end }}

{{- define "hw.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ default .Chart.AppVersion .Values.image.tag }}
{{- end -}}
{{- end }}

{{/* Selectors: (dict "root" $ "component" "cache"). Never change: they are immutable. */}}
{{- define "hw.selector" -}}
app.kubernetes.io/name: {{ include "hw.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "hw.labels" -}}
{{ include "hw.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: heavywater
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{/* "true" when groups run as LeaderWorkerSets, else empty. */}}
{{- define "hw.usesLws" -}}
{{- $workload := .Values.worker.workload -}}
{{- if or (eq $workload "LeaderWorkerSet") (and (eq $workload "auto") (.Capabilities.APIVersions.Has "leaderworkerset.x-k8s.io/v1")) -}}
true
{{- end -}}
{{- end }}

{{/* The label that tells a pod its rank. */}}
{{- define "hw.rankLabel" -}}
{{- if include "hw.usesLws" . -}}
leaderworkerset.sigs.k8s.io/worker-index
{{- else -}}
apps.kubernetes.io/pod-index
{{- end -}}
{{- end }}

{{- define "hw.loopback" -}}
{{ ternary "[::1]" "127.0.0.1" (eq .Values.ipFamily "IPv6") }}
{{- end }}

{{- define "hw.anyAddress" -}}
{{ ternary "[::]" "0.0.0.0" (eq .Values.ipFamily "IPv6") }}
{{- end }}

{{- define "hw.podAddress" -}}
{{ ternary "[$(POD_IP)]" "$(POD_IP)" (eq .Values.ipFamily "IPv6") }}
{{- end }}
