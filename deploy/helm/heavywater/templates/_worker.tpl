{{/* The pod of one rank: (dict "root" $ "group" INDEX), where INDEX is empty when the pod's
     label tells the group (one LeaderWorkerSet for all). */}}
{{- define "hw.workerLabels" -}}
{{ include "hw.selector" (dict "root" .root "component" "worker") }}
{{- if ne .group "" }}
heavywater/group: {{ .group | quote }}
{{- end }}
{{- end }}

{{- define "hw.workerAffinity" -}}
{{- $labels := include "hw.selector" (dict "root" .root "component" "cache") | fromYaml -}}
{{- if .root.Values.cache.perGroup -}}
{{- $_ := set $labels "apps.kubernetes.io/pod-index" .group -}}
{{- end -}}
{{- $term := dict "labelSelector" (dict "matchLabels" $labels) "topologyKey" "kubernetes.io/hostname" -}}
{{- $affinity := deepCopy .root.Values.worker.affinity -}}
{{- if eq .root.Values.worker.colocate "required" -}}
{{- $affinity = mergeOverwrite $affinity (dict "podAffinity" (dict "requiredDuringSchedulingIgnoredDuringExecution" (list $term))) -}}
{{- else if eq .root.Values.worker.colocate "preferred" -}}
{{- $affinity = mergeOverwrite $affinity (dict "podAffinity" (dict "preferredDuringSchedulingIgnoredDuringExecution" (list (dict "weight" 100 "podAffinityTerm" $term)))) -}}
{{- end -}}
{{- with $affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* The group's own cache service; where they share etcd and a Redis, so that a group finds its
     sequences there, also the next two: where it goes when its own is lost. In one order for all
     ranks of the group, in which the groups of a lost one spread out. */}}
{{- define "hw.cacheAddresses" -}}
{{- $cache := printf "%s-cache" (include "hw.fullname" .root) -}}
{{- $domain := printf "%s.%s.svc.%s:7700" $cache .root.Release.Namespace .root.Values.clusterDomain -}}
{{- if .root.Values.cache.perGroup -}}
{{- $groups := int .root.Values.worker.groups -}}
{{- $addresses := list (printf "%s-$(GROUP_INDEX).%s" $cache $domain) -}}
{{- $shared := and .root.Values.cache.config.etcd_endpoints .root.Values.cache.config.redis_address -}}
{{- range $step := untilStep 1 (ternary (min 3 $groups) 1 (not (empty $shared)) | int) 1 -}}
{{- $addresses = append $addresses (printf "%s-%d.%s" $cache (mod (add (int $.group) $step) $groups) $domain) -}}
{{- end -}}
{{- join "," $addresses -}}
{{- else -}}
{{- printf "%s-0.%s" $cache $domain -}}
{{- end -}}
{{- end }}

{{- define "hw.workerArgs" -}}
- --config=/etc/heavywater/worker.yaml
- --group={{ include "hw.fullname" .root }}-$(GROUP_INDEX)
- --rank=$(RANK)
- --advertised_address={{ include "hw.podAddress" .root }}:7701
- --comm_address=$(POD_IP)
- --cache_address={{ include "hw.cacheAddresses" . }}
{{- end }}

{{- define "hw.workerEnv" -}}
- name: POD_IP
  valueFrom:
    fieldRef:
      fieldPath: status.podIP
- name: RANK
  valueFrom:
    fieldRef:
      fieldPath: metadata.labels['{{ include "hw.rankLabel" .root }}']
- name: GROUP_INDEX
  {{- if ne .group "" }}
  value: {{ .group | quote }}
  {{- else }}
  valueFrom:
    fieldRef:
      fieldPath: metadata.labels['leaderworkerset.sigs.k8s.io/group-index']
  {{- end }}
{{- with .root.Values.worker.interface }}
- name: NCCL_SOCKET_IFNAME
  value: {{ . | quote }}
{{- end }}
{{- with include "hw.securityEnv" .root | trim }}
{{ . }}
{{- end }}
{{- with .root.Values.worker.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "hw.workerResources" -}}
{{- $resources := deepCopy .Values.worker.resources -}}
{{- if eq (default "cpu" .Values.worker.config.backend) "cuda" -}}
{{- $resources = mergeOverwrite $resources (dict "limits" (dict .Values.worker.gpuResource 1)) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end }}

{{- define "hw.workerTemplate" -}}
{{- $worker := .root.Values.worker -}}
{{- $parts := dict "root" .root "component" "worker" -}}
metadata:
  labels:
    {{- include "hw.workerLabels" . | nindent 4 }}
    {{- with $worker.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    checksum/config: {{ include "hw.workerConfig" .root | sha256sum }}
    {{- with $worker.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ include "hw.serviceAccount" .root }}
  automountServiceAccountToken: false
  terminationGracePeriodSeconds: {{ include "hw.gracePeriod" (dict "part" $worker "name" "worker") }}
  securityContext:
    {{- include "hw.podSecurity" .root | nindent 4 }}
  {{- with include "hw.pullSecrets" .root | trim }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- with $worker.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with include "hw.placement" $worker | trim }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- with include "hw.workerAffinity" . | trim }}
  {{- . | nindent 2 }}
  {{- end }}
  containers:
    - name: worker
      image: {{ include "hw.image" .root }}
      imagePullPolicy: {{ .root.Values.image.pullPolicy }}
      command: [heavywater-worker]
      args:
        {{- include "hw.workerArgs" . | nindent 8 }}
      env:
        {{- include "hw.workerEnv" . | nindent 8 }}
      ports:
        - {name: grpc, containerPort: 7701}
        - {name: metrics, containerPort: 9401}
      {{- include "hw.probes" (dict "root" .root "probes" $worker.probes "port" 7701) | nindent 6 }}
      {{- with include "hw.preStop" $worker.preStopSeconds | trim }}
      {{- . | nindent 6 }}
      {{- end }}
      securityContext:
        {{- include "hw.containerSecurity" .root | nindent 8 }}
      resources:
        {{- include "hw.workerResources" .root | nindent 8 }}
      volumeMounts:
        {{- include "hw.mounts" $parts | nindent 8 }}
        {{- if $worker.model.volume }}
        - name: model
          mountPath: {{ $worker.model.mountPath }}
          readOnly: true
        {{- end }}
  volumes:
    {{- include "hw.volumes" $parts | nindent 4 }}
    {{- with $worker.model.volume }}
    - name: model
      {{- toYaml . | nindent 6 }}
    {{- end }}
{{- end }}
