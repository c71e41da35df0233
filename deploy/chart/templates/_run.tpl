{{/* Containers and volumes of the DaemonSet. */}}
{{- define "ip-masq.run" -}}
{{- $agent := .Values.agentReplacement.enabled }}
{{- $directories := include "ip-masq.directories" . | fromYaml }}
{{- if not $agent -}}
initContainers:
  # Installs the plugin and its entry. If the node has no conflist yet, because the main CNI plugin
  # starts later, `run` inserts the entry.
  - name: install
    {{- include "ip-masq.image" . | nindent 4 }}
    args:
      - install
      - --conflist-manage
      - --cni-conf-dir=$(CNI_CONF_DIR)
      - --cni-bin-dir=$(CNI_BIN_DIR)
      {{- if .Values.bootUnit }}
      - --boot-unit={{ .Values.bootUnitDir }}
      {{- end }}
      {{- with include "ip-masq.flags" . | trim }}{{ nindent 6 . }}{{ end }}
    env:
      {{- include "ip-masq.directoryVariables" . | nindent 6 }}
    securityContext:
      allowPrivilegeEscalation: false
      readOnlyRootFilesystem: true
      capabilities:
        drop: [ALL]
    resources:
      {{- toYaml .Values.resources | nindent 6 }}
    volumeMounts:
      - name: cni-conf-dir
        mountPath: {{ $directories.conf }}
      - name: cni-bin-dir
        mountPath: {{ $directories.bin }}
      - name: state
        mountPath: /var/lib/cni
      - name: settings
        mountPath: /etc/ip-masq
        readOnly: true
      {{- with include "ip-masq.unitsMount" . | trim }}{{ nindent 6 . }}{{ end }}
{{- end }}
containers:
  - name: {{ include "ip-masq.containerName" . }}
    {{- include "ip-masq.image" . | nindent 4 }}
    args:
      - run
      {{- if $agent }}
      {{- range .Values.agentReplacement.args }}
      - {{ quote . }}
      {{- end }}
      {{- else }}
      - --conflist-manage
      - --cni-conf-dir=$(CNI_CONF_DIR)
      - --cni-bin-dir=$(CNI_BIN_DIR)
      - --backend=$(BACKEND)
      {{- end }}
      {{- with include "ip-masq.flags" . | trim }}{{ nindent 6 . }}{{ end }}
      {{- if and (include "ip-masq.metrics" .) .Values.metrics.address }}
      - --metrics-listen={{ .Values.metrics.address }}:{{ .Values.metrics.port }}
      {{- else if include "ip-masq.metrics" . }}
      # IPv6 addresses need the brackets; IPv4 addresses may have them.
      - --metrics-listen=[$(NODE_IP)]:{{ .Values.metrics.port }}
      {{- end }}
    env:
      {{- $atNode := and (include "ip-masq.metrics" .) (not .Values.metrics.address) }}
      {{- if and $agent (not $atNode) (not .Values.extraEnv) }} []{{ end }}
      {{- if $agent }}
      {{- with .Values.extraEnv }}{{ toYaml . | nindent 6 }}{{ end }}
      {{- else }}
      - name: BACKEND
        value: {{ .Values.policy.backend | default "auto" }}
      {{- include "ip-masq.directoryVariables" . | nindent 6 }}
      {{- end }}
      {{- if $atNode }}
      - name: NODE_IP
        valueFrom:
          fieldRef:
            fieldPath: status.hostIP
    ports:
      - name: metrics
        containerPort: {{ .Values.metrics.port }}
        hostPort: {{ .Values.metrics.port }}
        protocol: TCP
      {{- end }}
    {{- include "ip-masq.container" . | nindent 4 }}
    startupProbe:
      {{- include "ip-masq.httpGet" (dict "root" . "path" "/livez") | nindent 6 }}
      periodSeconds: 1
      failureThreshold: 60
    livenessProbe:
      {{- include "ip-masq.httpGet" (dict "root" . "path" "/livez") | nindent 6 }}
      periodSeconds: 10
      timeoutSeconds: 5
      failureThreshold: 6
    readinessProbe:
      {{- include "ip-masq.httpGet" (dict "root" . "path" "/readyz") | nindent 6 }}
      periodSeconds: 5
      timeoutSeconds: 5
    volumeMounts:
      {{- include "ip-masq.mounts" . | nindent 6 }}
volumes:
  {{- include "ip-masq.volumes" . | nindent 2 }}
{{- end }}

{{/* Containers and volumes of the DaemonSet that uninstalls ip-masq. The controller starts the pod of a
node after the reconciler there has ended, which would insert the entry again. A pod is ready when
nothing of ip-masq is left on its node. */}}
{{- define "ip-masq.uninstall" -}}
{{- $directories := include "ip-masq.directories" . | fromYaml -}}
containers:
  - name: {{ include "ip-masq.containerName" . }}
    {{- include "ip-masq.image" . | nindent 4 }}
    args:
      - uninstall
      - --stay
      - --cni-conf-dir=$(CNI_CONF_DIR)
      - --cni-bin-dir=$(CNI_BIN_DIR)
      {{- if .Values.bootUnit }}
      - --boot-unit={{ .Values.bootUnitDir }}
      {{- end }}
      {{- with include "ip-masq.flags" . | trim }}{{ nindent 6 . }}{{ end }}
      {{- range .Values.uninstall.args }}
      - {{ quote . }}
      {{- end }}
    env:
      {{- include "ip-masq.directoryVariables" . | nindent 6 }}
    {{- include "ip-masq.container" . | nindent 4 }}
    livenessProbe:
      {{- include "ip-masq.httpGet" (dict "root" . "path" "/livez") | nindent 6 }}
      periodSeconds: 10
      timeoutSeconds: 5
      failureThreshold: 6
    readinessProbe:
      {{- include "ip-masq.httpGet" (dict "root" . "path" "/readyz") | nindent 6 }}
      periodSeconds: 2
      timeoutSeconds: 5
    volumeMounts:
      - name: cni-conf-dir
        mountPath: {{ $directories.conf }}
      - name: cni-bin-dir
        mountPath: {{ $directories.bin }}
      {{- include "ip-masq.stateMounts" . | nindent 6 }}
      - name: containerd-state
        mountPath: {{ $directories.containerd }}
        readOnly: true
        mountPropagation: HostToContainer
      {{- with include "ip-masq.unitsMount" . | trim }}{{ nindent 6 . }}{{ end }}
      {{- if .Values.nodeSettings }}
      - name: settings
        mountPath: /etc/ip-masq
        readOnly: true
      {{- end }}
volumes:
  {{- include "ip-masq.runtimeVolumes" . | nindent 2 }}
  {{- include "ip-masq.stateVolumes" . | nindent 2 }}
  {{- if .Values.nodeSettings }}
  {{- include "ip-masq.nodeSettingsVolume" . | nindent 2 }}
  {{- end }}
  # `uninstall` does not wait for pods of containerd, and finds them here.
  - name: containerd-state
    hostPath:
      path: {{ $directories.containerd }}
      type: DirectoryOrCreate
{{- end }}
