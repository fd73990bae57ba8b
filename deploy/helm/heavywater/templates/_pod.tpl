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

{{/* The health service knows "" (bound), "liveness" and "readiness" (a group is complete, no
     drain). Startup must not ask for readiness: a rank that waits for the others is well.
     (dict "probes" .. "port" ..) */}}
{{- define "hw.probes" -}}
startupProbe:
  grpc:
    port: {{ .port }}
  periodSeconds: {{ .probes.periodSeconds }}
  timeoutSeconds: 3
  failureThreshold: {{ max 1 (div (int .probes.startupSeconds) (int .probes.periodSeconds)) }}
livenessProbe:
  grpc:
    port: {{ .port }}
    service: liveness
  periodSeconds: {{ .probes.periodSeconds }}
  timeoutSeconds: 3
  failureThreshold: {{ .probes.failureThreshold }}
readinessProbe:
  grpc:
    port: {{ .port }}
    service: readiness
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
