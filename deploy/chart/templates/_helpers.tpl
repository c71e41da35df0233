{{/* The names of objects do not contain the name of the release, because a node has one reconciler. */}}
{{- define "ip-masq.name" -}}
{{ .Values.nameOverride | default "ip-masq" }}
{{- end }}

{{- define "ip-masq.fullname" -}}
{{ .Values.fullnameOverride | default (include "ip-masq.name" .) }}
{{- end }}

{{/* The DaemonSet and the container that replace an agent have the names of the agent's. */}}
{{- define "ip-masq.daemonSet" -}}
{{ if and .Values.agentReplacement.enabled (not .Values.fullnameOverride) }}ip-masq-agent{{ else }}{{ include "ip-masq.fullname" . }}{{ end }}
{{- end }}

{{- define "ip-masq.containerName" -}}
{{ if .Values.agentReplacement.enabled }}ip-masq-agent{{ else }}ip-masq{{ end }}
{{- end }}

{{/* Labels of an object, for (list . COMPONENT). */}}
{{- define "ip-masq.labels" -}}
{{- $ := index . 0 -}}
app.kubernetes.io/name: {{ include "ip-masq.name" $ }}
app.kubernetes.io/instance: {{ $.Release.Name }}
app.kubernetes.io/version: {{ $.Chart.AppVersion }}
app.kubernetes.io/component: {{ index . 1 }}
app.kubernetes.io/managed-by: {{ $.Release.Service }}
helm.sh/chart: {{ $.Chart.Name }}-{{ $.Chart.Version }}
{{- with $.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Labels of a pod, for (list . NAME COMPONENT). */}}
{{- define "ip-masq.podLabels" -}}
{{- $ := index . 0 -}}
app.kubernetes.io/name: {{ index . 1 }}
app.kubernetes.io/component: {{ index . 2 }}
{{- with merge (dict) $.Values.podLabels $.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "ip-masq.component" -}}
{{ .Values.uninstall.enabled | ternary "uninstall" "reconciler" }}
{{- end }}

{{- define "ip-masq.serviceAccount" -}}
{{ if .Values.serviceAccount.name }}{{ .Values.serviceAccount.name }}{{ else if or .Values.serviceAccount.create (eq .Values.platform "openshift") }}{{ include "ip-masq.fullname" . }}{{ end }}
{{- end }}

{{/* The fields of a pod that place it on nodes, and its priority and pull secrets. */}}
{{- define "ip-masq.placement" -}}
priorityClassName: {{ .Values.priorityClassName }}
nodeSelector:
  {{- merge (dict "kubernetes.io/os" "linux") .Values.nodeSelector | toYaml | nindent 2 }}
{{- with include "ip-masq.affinity" . | fromYaml }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Match expressions that exclude nodes, as YAML of an object with the list `expressions`. */}}
{{- define "ip-masq.excluded" -}}
{{- $expressions := list }}
{{- range $label, $value := .Values.excludedNodes }}
{{- $expressions = append $expressions (dict "key" $label "operator" "NotIn" "values" (list $value)) }}
{{- end }}
{{- if and .Values.agentReplacement.enabled (not .Values.uninstall.enabled) }}
{{- /* The DaemonSet ip-masq runs on nodes with this label, which migrate to the plugin (docs/migrate.md). */}}
{{- $expressions = append $expressions (dict "key" "ip-masq.github.io/plugin" "operator" "DoesNotExist") }}
{{- end }}
{{- dict "expressions" $expressions | toYaml }}
{{- end }}

{{/* The value affinity, with the excluded nodes in each of its terms. */}}
{{- define "ip-masq.affinity" -}}
{{- $required := "requiredDuringSchedulingIgnoredDuringExecution" }}
{{- $affinity := deepCopy .Values.affinity }}
{{- $excluded := (include "ip-masq.excluded" . | fromYaml).expressions }}
{{- if $excluded }}
{{- $node := $affinity.nodeAffinity | default dict }}
{{- $terms := list }}
{{- range (get $node $required | default dict).nodeSelectorTerms | default (list dict) }}
{{- $terms = append $terms (set . "matchExpressions" (concat (.matchExpressions | default list) $excluded)) }}
{{- end }}
{{- $_ := set $affinity "nodeAffinity" (set $node $required (dict "nodeSelectorTerms" $terms)) }}
{{- end }}
{{- toYaml $affinity }}
{{- end }}

{{/* The directories of the container runtime, as YAML. */}}
{{- define "ip-masq.directories" -}}
{{- $platforms := dict
  "default" (list "/etc/cni/net.d" "/opt/cni/bin" "/run/containerd")
  "gke" (list "/etc/cni/net.d" "/home/kubernetes/bin" "/run/containerd")
  "k3s" (list "/var/lib/rancher/k3s/agent/etc/cni/net.d" "/var/lib/rancher/k3s/data/cni" "/run/k3s/containerd")
  "microk8s" (list "/var/snap/microk8s/current/args/cni-network" "/var/snap/microk8s/current/opt/cni/bin" "/var/snap/microk8s/common/run/containerd")
  "openshift" (list "/run/multus/cni/net.d" "/var/lib/cni/bin" "/run/containerd") }}
{{- $directories := get $platforms .Values.platform -}}
conf: {{ .Values.cniConfDir | trimSuffix "/" | default (index $directories 0) }}
bin: {{ .Values.cniBinDir | trimSuffix "/" | default (index $directories 1) }}
containerd: {{ .Values.containerdStateDir | trimSuffix "/" | default (index $directories 2) }}
{{- end }}

{{/* "true" if rules may be in iptables. */}}
{{- define "ip-masq.iptables" -}}
{{ if or .Values.image.iptables .Values.agentReplacement.enabled (ne (.Values.policy.backend | default "auto") "nftables") }}true{{ end }}
{{- end }}

{{/* "true" if /metrics is served. */}}
{{- define "ip-masq.metrics" -}}
{{ if or .Values.metrics.enabled .Values.monitoring.enabled }}true{{ end }}
{{- end }}

{{/* The fields of a pod except its containers and volumes. */}}
{{- define "ip-masq.pod" -}}
# The rules are those of the node's network namespace.
hostNetwork: true
dnsPolicy: Default
# The containers do not use the Kubernetes API.
automountServiceAccountToken: false
enableServiceLinks: false
{{- with include "ip-masq.serviceAccount" . }}
serviceAccountName: {{ . }}
{{- end }}
# The rules stay when the pod ends, so the pod has nothing to finish.
terminationGracePeriodSeconds: 10
{{ include "ip-masq.placement" . }}
# The files on the node belong to root, and only root gets the capabilities. Each container drops
# all other capabilities.
securityContext:
  runAsUser: 0
  runAsGroup: 0
  {{- if or .Values.selinux (eq .Values.platform "openshift") }}
  # On nodes that enforce SELinux, the default domain of containers may not write on the node.
  seLinuxOptions:
    type: spc_t
  {{- end }}
  seccompProfile:
    type: RuntimeDefault
{{- end }}

{{- define "ip-masq.image" -}}
{{- $tag := printf "%s%s" (.Values.image.tag | default .Chart.AppVersion) (include "ip-masq.iptables" . | empty | ternary "" "-iptables") -}}
image: {{ .Values.image.repository }}:{{ $tag }}{{ with .Values.image.digest }}@{{ . }}{{ end }}
{{- with .Values.image.pullPolicy }}
imagePullPolicy: {{ . }}
{{- end }}
{{- end }}

{{/* The fields of a container that reads or writes rules. */}}
{{- define "ip-masq.container" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
    {{- if include "ip-masq.iptables" . }}
    # iptables-legacy opens a raw socket, which needs NET_RAW.
    add: [NET_ADMIN, NET_RAW]
    {{- else }}
    add: [NET_ADMIN]
    {{- end }}
resources:
  {{- toYaml .Values.resources | nindent 2 }}
{{- end }}

{{- define "ip-masq.directoryVariables" -}}
{{- $directories := include "ip-masq.directories" . | fromYaml -}}
- name: CNI_CONF_DIR
  value: {{ $directories.conf }}
- name: CNI_BIN_DIR
  value: {{ $directories.bin }}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* The flags of every command, for values that are not the defaults, one a line. */}}
{{- define "ip-masq.flags" -}}
{{- with .Values.policy.dataDir }}
- --data-dir={{ trimSuffix "/" . }}
{{- end }}
{{- if ne (int .Values.healthPort) 19820 }}
- --health-listen=127.0.0.1:{{ .Values.healthPort }}
{{- end }}
{{- end }}

{{- define "ip-masq.httpGet" -}}
httpGet:
  host: 127.0.0.1
  port: {{ .root.Values.healthPort }}
  path: {{ .path }}
{{- end }}

{{/* The volume mounts of `run`. */}}
{{- define "ip-masq.mounts" -}}
{{- include "ip-masq.stateMounts" . }}
- name: agent-config
  mountPath: /etc/config
  readOnly: true
{{- if not .Values.agentReplacement.enabled }}
{{- $directories := include "ip-masq.directories" . | fromYaml }}
- name: cni-conf-dir
  mountPath: {{ $directories.conf }}
- name: cni-bin-dir
  mountPath: {{ $directories.bin }}
  readOnly: true
- name: settings
  mountPath: /etc/ip-masq
  readOnly: true
- name: netns
  mountPath: /run/netns
  readOnly: true
  mountPropagation: HostToContainer
{{- if .Values.bootUnit }}
# `status` looks here for the boot unit.
- name: units
  mountPath: {{ .Values.bootUnitDir }}
  readOnly: true
{{- end }}
{{- end }}
{{- end }}

{{- define "ip-masq.stateMounts" -}}
- name: state
  mountPath: /var/lib/cni
{{- if include "ip-masq.iptables" . }}
- name: xtables-lock
  mountPath: /run/xtables.lock
{{- end }}
{{- end }}

{{/* The mount of the directory of units, for `install` and `uninstall`. */}}
{{- define "ip-masq.unitsMount" -}}
{{- if .Values.bootUnit }}
- name: units
  mountPath: {{ .Values.bootUnitDir }}
{{- end }}
{{- end }}

{{/* The volumes of `run`. Each directory of the node is mounted at its own path, so that messages name
paths of the node. */}}
{{- define "ip-masq.volumes" -}}
{{- include "ip-masq.stateVolumes" . }}
# The ConfigMap of the agents, if it exists.
- name: agent-config
{{- with .Values.agentConfig.configMaps }}
  projected:
    sources:
      {{- range . }}
      - configMap:
          name: {{ quote . }}
          optional: true
      {{- end }}
{{- else }}
  configMap:
    name: ip-masq-agent
    optional: true
    items:
      - key: config
        path: ip-masq-agent
{{- end }}
{{- if not .Values.agentReplacement.enabled }}
{{ include "ip-masq.runtimeVolumes" . }}
{{- if .Values.nodeSettings }}
{{ include "ip-masq.nodeSettingsVolume" . }}
{{- else }}
- name: settings
  configMap:
    name: {{ include "ip-masq.fullname" . }}
{{- end }}
# The reconciler looks here which pods of the runtime's cache still run. Without the propagation, the
# mount would keep their network namespaces in existence.
- name: netns
  hostPath:
    path: /run/netns
    type: DirectoryOrCreate
{{- end }}
{{- end }}

{{- define "ip-masq.runtimeVolumes" -}}
{{- $directories := include "ip-masq.directories" . | fromYaml -}}
- name: cni-conf-dir
  hostPath:
    path: {{ $directories.conf }}
    type: DirectoryOrCreate
# This directory is not created. If it is missing, the runtime uses another one, and the events of
# the pod name the missing directory.
- name: cni-bin-dir
  hostPath:
    path: {{ $directories.bin }}
    type: Directory
{{- if .Values.bootUnit }}
- name: units
  hostPath:
    path: {{ .Values.bootUnitDir }}
    type: DirectoryOrCreate
{{- end }}
{{- end }}

{{- define "ip-masq.nodeSettingsVolume" -}}
- name: settings
  hostPath:
    path: /etc/ip-masq
    type: Directory
{{- end }}

{{- define "ip-masq.stateVolumes" -}}
# The plugin has its state in the subdirectory ip-masq, and runtimes have caches beside it.
- name: state
  hostPath:
    path: /var/lib/cni
    type: DirectoryOrCreate
{{- if include "ip-masq.iptables" . }}
# All programs on the node that use iptables-legacy share this lock.
- name: xtables-lock
  hostPath:
    path: /run/xtables.lock
    type: FileOrCreate
{{- end }}
{{- end }}

{{/* The plugin entry. */}}
{{- define "ip-masq.entry" -}}
{"type": "ip-masq"
{{- range $key, $value := .Values.policy }}, {{ toJson $key }}: {{ include "ip-masq.value" (list $key $value) }}{{ end }}}
{{- end }}

{{/* The value of a key as JSON. In YAML, off without quotes is false. */}}
{{- define "ip-masq.value" -}}
{{- $key := index . 0 }}{{ $value := index . 1 }}
{{- if and (eq $key "guard") (kindIs "bool" $value) }}{{ $value = "off" }}{{ end }}
{{- if eq $key "dataDir" }}{{ $value = trimSuffix "/" $value }}{{ end }}
{{- toJson $value }}
{{- end }}

{{/* The text of reconciler.toml. JSON strings, numbers, booleans and lists are TOML too. The agent files
get the chain of the plugin entry: with two chains, each would masquerade what the other exempts. */}}
{{- define "ip-masq.toml" -}}
{{- $settings := .Values.reconciler }}
{{- with .Values.policy.masqChain }}{{ $settings = merge (dict "agent" (dict "masqChain" .)) $settings }}{{ end }}
{{- range $key, $value := $settings }}
{{- if not (kindIs "map" $value) }}{{ $key }} = {{ toJson $value }}
{{ end }}
{{- end }}
{{- range $table, $keys := $settings }}
{{- if kindIs "map" $keys }}
[{{ $table }}]
{{ range $key, $value := $keys }}{{ $key }} = {{ include "ip-masq.value" (list $key $value) }}
{{ end }}
{{- end }}
{{- end }}
{{- end }}

{{/* Refuses mistakes that the schema cannot express, with the messages of the plugin. */}}
{{- define "ip-masq.validate" -}}
{{- $limit := .Values.policy.cidrLimit | default 64 | int }}
{{- $exempt := .Values.policy.nonMasqueradeCIDRs | default list }}
{{- $count := add (len (uniq $exempt)) (len (uniq (.Values.policy.masqueradeCIDRs | default list))) | int }}
{{- if gt $count $limit }}
{{- fail (printf "policy.cidrLimit: nonMasqueradeCIDRs and masqueradeCIDRs have %d entries together, more than the %d allowed; remove some or raise cidrLimit" $count $limit) }}
{{- end }}
{{- range $index, $cidr := .Values.policy.masqueradeCIDRs }}
{{- if has $cidr $exempt }}
{{- fail (printf "policy.masqueradeCIDRs[%d]: %s is in nonMasqueradeCIDRs too; remove one of the two" $index $cidr) }}
{{- end }}
{{- end }}
{{- $chain := .Values.policy.masqChain | default "IP-MASQ-AGENT" }}
{{- range $from, $policy := dict "policy" .Values.policy "agentConfig.config" (.Values.agentConfig.config | default dict) "reconciler.agent" (.Values.reconciler.agent | default dict) }}
{{- if not (or $.Values.nodeSettings $.Values.agentReplacement.enabled (eq $chain ($policy.masqChain | default $chain))) }}
{{- fail (printf "%s.masqChain: %s differs from policy.masqChain, %s, and each chain would masquerade what the other exempts; state the chain in policy.masqChain alone" $from $policy.masqChain $chain) }}
{{- end }}
{{- range $key, $list := $policy }}
{{- range $index, $item := kindIs "slice" $list | ternary $list list }}
{{- if contains "/" $item }}{{/* a prefix: no name of an interface has a slash */}}
{{- $at := printf "%s.%s[%d]" $from $key $index }}
{{- if and (eq $from "policy") (contains ":" $item) (not $.Values.policy.enableIPv6) }}
{{- fail (printf "%s: %s is an IPv6 prefix, but IPv6 is not enabled; set enableIPv6 to true, or remove it" $at $item) }}
{{- end }}
{{- include "ip-masq.validateCIDR" (dict "cidr" $item "at" $at) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- if .Values.reconciler }}
{{- if .Values.nodeSettings }}{{ fail "reconciler: has no effect with nodeSettings; write it into /etc/ip-masq/reconciler.toml of the nodes" }}{{ end }}
{{- if .Values.agentReplacement.enabled }}{{ fail "reconciler: has no effect with agentReplacement; write flags into agentReplacement.args" }}{{ end }}
{{- end }}
{{- if and .Values.nodeReadiness.enabled (dig "nodeAffinity" "requiredDuringSchedulingIgnoredDuringExecution" dict .Values.affinity) }}
{{- fail "affinity.nodeAffinity: a NodeReadinessRule cannot have it, and would taint nodes without a reporter; select nodes by nodeSelector and excludedNodes" }}
{{- end }}
{{- if and .Values.monitoring.enabled .Values.metrics.address }}
{{- fail "metrics.address: the PodMonitor of monitoring needs the node's address" }}
{{- end }}
{{- if and .Values.agentConfig.config .Values.agentConfig.configMaps }}
{{- fail "agentConfig.config: has no effect with agentConfig.configMaps; write it into one of those" }}
{{- end }}
{{- end }}

{{/* Fails if an IPv4 prefix has host bits. */}}
{{- define "ip-masq.validateCIDR" -}}
{{- if contains "." .cidr }}
{{- $parts := regexSplit "[./]" .cidr -1 }}
{{- $size := 1 }}
{{- range until (int (sub 32 (index $parts 4 | atoi))) }}{{ $size = mul $size 2 }}{{ end }}
{{- $address := 0 }}
{{- range slice $parts 0 4 }}{{ $address = add (mul $address 256) (atoi .) }}{{ end }}
{{- $host := mod $address $size }}
{{- if $host }}
{{- $rest := sub $address $host }}
{{- $octets := list }}
{{- range until 4 }}{{ $octets = prepend $octets (mod $rest 256 | toString) }}{{ $rest = div $rest 256 }}{{ end }}
{{- fail (printf "%s: %s has host bits set; did you mean %s/%s?" .at .cidr (join "." $octets) (index $parts 4)) }}
{{- end }}
{{- end }}
{{- end }}
