{{/* Parts of the pods of cache service and workers. */}}
{{- define "hw.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ .Values.security.runAsUser }}
runAsGroup: {{ .Values.security.runAsGroup }}
fsGroup: {{ .Values.security.fsGroup }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "hw.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* The kubelet's own probes know no TLS: then the image's tool asks. */}}
{{- define "hw.probe" -}}
{{- if .root.Values.tls.enabled -}}
exec:
  command: [heavywater-health, "{{ include "hw.loopback" .root }}:{{ .port }}"{{ with .service }}, {{ . }}{{ end }}]
{{- else -}}
grpc:
  port: {{ .port }}
  {{- with .service }}
  service: {{ . }}
  {{- end }}
{{- end -}}
{{- end }}

{{/* What the image's tools and clients in a pod's shell read. */}}
{{- define "hw.securityEnv" -}}
{{- if .Values.tls.enabled }}
- name: HEAVYWATER_TLS_CA_FILE
  value: /etc/heavywater-tls/ca.crt
- name: HEAVYWATER_TLS_SERVER_NAME
  value: {{ .Values.tls.serverName | quote }}
{{- if .Values.tls.clientCertificates }}
- name: HEAVYWATER_TLS_CERT_FILE
  value: /etc/heavywater-tls/tls.crt
- name: HEAVYWATER_TLS_KEY_FILE
  value: /etc/heavywater-tls/tls.key
{{- end }}
{{- end }}
{{- end }}

{{/* The health service knows "" (bound), "liveness" and "readiness" (a group is complete, no
     drain). Startup must not ask for readiness: a rank that waits for the others is well.
     (dict "root" $ "probes" .. "port" ..) */}}
{{- define "hw.probes" -}}
startupProbe:
  {{- include "hw.probe" (dict "root" .root "port" .port "service" "") | nindent 2 }}
  periodSeconds: {{ .probes.periodSeconds }}
  timeoutSeconds: 3
  failureThreshold: {{ max 1 (div (int .probes.startupSeconds) (int .probes.periodSeconds)) }}
livenessProbe:
  {{- include "hw.probe" (dict "root" .root "port" .port "service" "liveness") | nindent 2 }}
  periodSeconds: {{ .probes.periodSeconds }}
  timeoutSeconds: 3
  failureThreshold: {{ .probes.failureThreshold }}
readinessProbe:
  {{- include "hw.probe" (dict "root" .root "port" .port "service" "readiness") | nindent 2 }}
  periodSeconds: {{ .probes.periodSeconds }}
  timeoutSeconds: 3
  failureThreshold: 1
{{- end }}

{{- define "hw.preStop" -}}
{{- if . }}
lifecycle:
  preStop:
    exec:
      command: [sleep, {{ . | quote }}]
{{- end }}
{{- end }}

{{/* Where pods run: .Values.cache or .Values.worker, less the affinity. */}}
{{- define "hw.placement" -}}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .topologySpreadConstraints }}
topologySpreadConstraints:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "hw.volumes" -}}
- name: config
  configMap:
    name: {{ include "hw.fullname" .root }}-{{ .component }}
- name: tmp
  emptyDir: {}
{{- if .root.Values.tls.enabled }}
- name: tls
  secret:
    secretName: {{ .root.Values.tls.secretName }}
    defaultMode: 0440
{{- end }}
{{- if .root.Values.tokens.secretName }}
- name: tokens
  secret:
    secretName: {{ .root.Values.tokens.secretName }}
    defaultMode: 0440
    {{- if eq .component "cache" }}
    items: [{key: tokens, path: tokens}]  # hashes: the workers' own token is not for it
    {{- end }}
{{- end }}
{{- if eq .root.Values.sharedMemory.mode "hostPath" }}
- name: shm
  hostPath:
    path: {{ .root.Values.sharedMemory.hostPath }}
    type: Directory
{{- else if eq .component "worker" }}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ int64 .root.Values.sharedMemory.privateBytes | toString | quote }}
{{- end }}
{{- end }}

{{- define "hw.mounts" -}}
- name: config
  mountPath: /etc/heavywater
  readOnly: true
- name: tmp
  mountPath: /tmp
{{- if .root.Values.tls.enabled }}
- name: tls
  mountPath: /etc/heavywater-tls
  readOnly: true
{{- end }}
{{- if .root.Values.tokens.secretName }}
- name: tokens
  mountPath: /etc/heavywater-tokens
  readOnly: true
{{- end }}
{{- if or (eq .root.Values.sharedMemory.mode "hostPath") (eq .component "worker") }}
- name: shm
  mountPath: /dev/shm
{{- end }}
{{- end }}

{{- define "hw.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end }}
