{{- define "juice.name" -}}
{{- if contains "juice" .Release.Name }}{{ .Release.Name }}{{ else }}{{ .Release.Name }}-juice{{ end -}}
{{- end }}

{{- define "juice.selector" -}}
app.kubernetes.io/name: juice
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "juice.labels" -}}
{{ include "juice.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "juice.metadata" -}}
name: {{ include "juice.name" . }}
labels:
  {{- include "juice.labels" . | nindent 2 }}
{{- end }}

{{- /* The arguments after `juice serve`. They win over the image's variables. */ -}}
{{- define "juice.args" -}}
{{- $values := .Values -}}
- --model={{ $values.model }}
- --engine={{ $values.engine }}
- --host=0.0.0.0
- --port={{ $values.port }}
- --admin-port={{ $values.adminPort }}
- --log-format=json
- --lame-duck={{ $values.lameDuckSeconds }}
- --drain={{ $values.drainSeconds }}
{{- if not $values.keys.open }}
- --api-keys-file=/etc/juice/keys/{{ $values.keys.key }}
{{- end }}
{{- if include "juice.hasHeadSets" . }}
- --head-sets=/head_sets
{{- end }}
{{- range $flag, $value := $values.flags }}
{{- if kindIs "slice" $value }}
{{- range $value }}
- {{ printf "--%s=%v" $flag . | quote }}
{{- end }}
{{- else if kindIs "bool" $value }}
{{- if $value }}
- --{{ $flag }}
{{- end }}
{{- else if kindIs "float64" $value }}
{{- /* YAML's integers are floats here, and large ones must not become 1e+06. */}}
- --{{ $flag }}={{ if eq $value (floor $value) }}{{ int64 $value }}{{ else }}{{ $value }}{{ end }}
{{- else }}
- {{ printf "--%s=%v" $flag $value | quote }}
{{- end }}
{{- end }}
{{- end }}

{{- define "juice.hasHeadSets" -}}
{{- if and .Values.headSets.existingClaim .Values.headSets.configMaps -}}
{{- fail "headSets: existingClaim and configMaps are both set; give one of them" -}}
{{- end -}}
{{- if or .Values.headSets.existingClaim .Values.headSets.configMaps }}yes{{ end -}}
{{- end }}

{{- define "juice.keysSecret" -}}
{{- $keys := .Values.keys -}}
{{- $n := 0 -}}
{{- range list $keys.existingSecret $keys.file $keys.open }}{{ if . }}{{ $n = add1 $n }}{{ end }}{{ end -}}
{{- if ne (int $n) 1 -}}
{{- fail (printf "keys: %d of existingSecret, file and open are set; expected one: give a Secret with the keys, or keys.open=true to serve everybody" (int $n)) -}}
{{- end -}}
{{- if not $keys.open }}{{ $keys.existingSecret | default (printf "%s-keys" (include "juice.name" .)) }}{{ end -}}
{{- end }}
