{{- define "ckfs.labels" -}}
app.kubernetes.io/name: ckfs
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "ckfs.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "ckfs.csiMounts" -}}
{{- if .Values.models.hostPath }}
- { name: models, mountPath: /models, readOnly: true, mountPropagation: HostToContainer }
{{- else }}
- { name: models, mountPath: /models, readOnly: true }
{{- end }}
{{- if .Values.csi.cachePath }}
- { name: cache, mountPath: /cache }
{{- end }}
{{- end }}

{{- define "ckfs.csiVolumes" -}}
- name: kubelet
  hostPath: { path: {{ .Values.csi.kubeletPath }}, type: Directory }
- name: models
  {{- if .Values.models.hostPath }}
  hostPath: { path: {{ .Values.models.hostPath }}, type: Directory }
  {{- else }}
  emptyDir: {}
  {{- end }}
{{- if .Values.csi.cachePath }}
- name: cache
  hostPath: { path: {{ .Values.csi.cachePath }}, type: DirectoryOrCreate }
{{- end }}
{{- end }}

{{- define "ckfs.csiHelper" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: { drop: [ALL] }
resources:
  requests: { cpu: 10m, memory: 16Mi }
  limits: { memory: 64Mi }
{{- end }}
