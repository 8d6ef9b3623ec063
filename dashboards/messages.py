"""What a person is sent, in words: one template text for Alertmanager's receivers and Grafana's contact points.

What, where, why, how long is left, what was done, what to do, and the link; the annotations of the rules say each.
"""

from typing import Final

TITLE: Final = '{{ template "foreshock.title" . }}'
MESSAGE: Final = '{{ template "foreshock.message" . }}'
"""What a receiver names as its title and its text."""

TEMPLATES: Final = """\
{{ define "foreshock.title" -}}
{{ if eq .Status "resolved" }}Resolved: {{ else if eq .CommonLabels.severity "critical" }}Critical: {{ end -}}
{{ if eq (len .Alerts) 1 }}{{ (index .Alerts 0).Annotations.summary }}{{ else -}}
{{ len .Alerts }} alerts {{ .CommonLabels.alertname }}{{ with .CommonLabels.run }} in run {{ . }}{{ end }}{{ end }}
{{- end }}

{{ define "foreshock.message" -}}
{{ range $i, $alert := .Alerts }}{{ if $i }}

{{ end }}{{ .Annotations.summary }}.
{{ if eq .Status "resolved" }}Over since {{ .EndsAt.Format "2006-01-02 15:04 MST" }}.{{ else -}}
{{ .Annotations.description }}
{{- with .Annotations.done }}
Done: {{ . }}{{ end }}
To do: {{ .Annotations.action }}
Since {{ .StartsAt.Format "2006-01-02 15:04 MST" }}.{{ end }}
{{- with .Annotations.page_url }}
Evidence and switch: {{ . }}{{ end }}
{{- with .Annotations.dashboard_url }}
Dashboard: {{ . }}{{ end }}
{{- with .Annotations.runbook_url }}
Runbook: {{ . }}{{ end }}
{{- end }}
{{- end }}
"""
"""Go templates: "foreshock.title" and "foreshock.message"."""
