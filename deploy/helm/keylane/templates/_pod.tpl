{{- define "keylane.labels" -}}
app.kubernetes.io/name: {{ .name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- end }}

{{- define "keylane.podSecurity" -}}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "keylane.image" -}}
image: "{{ .Values.image.repository }}:{{ .Values.image.tag }}"
imagePullPolicy: {{ .Values.image.pullPolicy }}
envFrom:
  - secretRef: {name: {{ .Values.natsSecret }}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{- define "keylane.probes" -}}
startupProbe:
  httpGet: {path: /readyz, port: http}
  periodSeconds: 2
  failureThreshold: 60
readinessProbe:
  httpGet: {path: /readyz, port: http}
  periodSeconds: 5
livenessProbe:
  httpGet: {path: /healthz, port: http}
  periodSeconds: 10
  failureThreshold: 6
{{- end }}

{{- define "keylane.service" -}}
apiVersion: v1
kind: Service
metadata:
  name: {{ .name }}
  labels: {{- include "keylane.labels" . | nindent 4 }}
spec:
  selector: {{- include "keylane.labels" . | nindent 4 }}
  ports:
    - {name: http, port: {{ .port }}, targetPort: http}
{{- end }}

{{- define "keylane.disruptionBudget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ .name }}
spec:
  maxUnavailable: 1
  selector:
    matchLabels: {{- include "keylane.labels" . | nindent 6 }}
{{- end }}

{{- define "keylane.autoscaler" -}}
{{- $scale := .of.autoscale }}
{{- $labels := dict "name" (printf "%s-autoscale" .of.name) "root" .root }}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ .of.name }}-autoscale
  labels: {{- include "keylane.labels" $labels | nindent 4 }}
spec:
  replicas: 1
  strategy: {type: Recreate}
  selector:
    matchLabels: {{- include "keylane.labels" $labels | nindent 6 }}
  template:
    metadata:
      labels: {{- include "keylane.labels" $labels | nindent 8 }}
    spec:
      {{- include "keylane.podSecurity" . | nindent 6 }}
      containers:
        - name: autoscale
          {{- include "keylane.image" .root | nindent 10 }}
          args:
            - autoscale
            - {{ $scale.stream }}
            - {{ $scale.group }}
            - --min={{ $scale.min }}
            - --max={{ $scale.max }}
            - --target-age={{ $scale.targetAge }}
            - --window={{ $scale.window }}
            {{- with .pool }}
            - --pool={{ . }}
            {{- end }}
            - --port=9466
            - --json
          ports:
            - {name: http, containerPort: 9466}
          livenessProbe:
            httpGet: {path: /healthz, port: http}
            initialDelaySeconds: 30
            periodSeconds: 10
            failureThreshold: 6
          resources: {{- toYaml .root.Values.autoscaler.resources | nindent 12 }}
{{- end }}
