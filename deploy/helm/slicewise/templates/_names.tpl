{{- define "slicewise.labels" -}}
app.kubernetes.io/name: slicewise
{{- end }}
