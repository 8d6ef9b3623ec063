"""What a person is sent, in words: one template text for Alertmanager's receivers.

What, where, why, how long is left, what was done, what to do, and the link; the annotations of the rules say each. Of
more than two alerts every one is a line, and of more than six the rest is counted: a message stays readable.
"""

from typing import Final

TITLE: Final = '{{ template "foreshock.title" . }}'
MESSAGE: Final = '{{ template "foreshock.message" . }}'
"""What a receiver names as its title and its text."""

TEMPLATES: Final = """\
{{ define "foreshock.title" -}}
{{ $severity := "" }}{{ $other := false }}{{ $name := (index .Alerts 0).Labels.alertname -}}
{{ range .Alerts }}{{ if ne .Labels.alertname $name }}{{ $other = true }}{{ end -}}
{{ if eq .Labels.severity "critical" }}{{ $severity = "Critical: " -}}
{{ else if and (eq .Labels.severity "warning") (eq $severity "") }}{{ $severity = "Warning: " }}{{ end }}{{ end -}}
{{ if eq .Status "resolved" }}Resolved: {{ else }}{{ $severity }}{{ end -}}
{{ if eq (len .Alerts) 1 }}{{ (index .Alerts 0).Annotations.summary }}{{ else -}}
{{ len .Alerts }} alerts{{ if not $other }} {{ $name }}{{ end -}}
{{ with .CommonLabels.run }} in run {{ . }}{{ end }}{{ end }}
{{- end }}

{{ define "foreshock.message" -}}
{{ $few := le (len .Alerts) 2 -}}
{{ range $i, $alert := .Alerts }}{{ if lt $i 6 }}{{ if $i }}
{{ if $few }}
{{ end }}{{ end }}{{ .Annotations.summary }}.
{{- if eq .Status "resolved" }} Over since {{ .EndsAt.Format "2006-01-02 15:04 MST" }}.{{ else if $few }}
{{ .Annotations.description }}
{{- with .Annotations.done }}
Done: {{ . }}{{ end }}
To do: {{ .Annotations.action }}
Since {{ .StartsAt.Format "2006-01-02 15:04 MST" }}.{{ end }}
{{- if $few }}
{{- with .Annotations.page_url }}
Evidence and switch: {{ . }}{{ end }}
{{- with .Annotations.dashboard_url }}
Dashboard: {{ . }}{{ end }}
{{- with .Annotations.runbook_url }}
Runbook: {{ . }}{{ end }}
{{- end }}{{ end }}{{ end }}
{{- if gt (len .Alerts) 6 }}
... and more: {{ len .Alerts }} in all.{{ end }}
{{- if not $few }}{{ if ne .Status "resolved" }}{{ with .CommonAnnotations.action }}
To do: {{ . }}{{ end }}{{ end }}{{ if .CommonLabels.run }}{{ with (index .Alerts 0).Annotations.page_url }}
Evidence and switch: {{ . }}{{ end }}{{ end }}{{ with .CommonAnnotations.runbook_url }}
Runbook: {{ . }}{{ end }}{{ end }}
{{- end }}
"""
"""Go templates: "foreshock.title" and "foreshock.message"."""
