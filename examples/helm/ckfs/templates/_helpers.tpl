{{- define "ckfs.labels" -}}
app.kubernetes.io/name: ckfs
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "ckfs.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}
