// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"strings"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
)

// kubeletSettings returns the settings of kubelet that differ from the defaults. It must not write
// kernel parameters and OOM scores, which are shared with other nodes, and must accept cgroup
// version 1 and small disks.
func (n *Node) kubeletSettings(a *authority, serving pair) map[string]any {
	return map[string]any{
		"apiVersion":                    "kubelet.config.k8s.io/v1beta1",
		"kind":                          "KubeletConfiguration",
		"authentication":                map[string]any{"anonymous": map[string]any{"enabled": false}, "x509": map[string]any{"clientCAFile": a.caFile()}},
		"authorization":                 map[string]any{"mode": "Webhook"},
		"tlsCertFile":                   serving.certificate,
		"tlsPrivateKeyFile":             serving.key,
		"containerRuntimeEndpoint":      "unix:///run/containerd/containerd.sock",
		"registerWithTaints":            n.cluster.options.Taints,
		"failCgroupV1":                  false,
		"cgroupDriver":                  "cgroupfs",
		"cgroupRoot":                    n.Cgroup,
		"enforceNodeAllocatable":        []string{},
		"oomScoreAdj":                   0,
		"localStorageCapacityIsolation": false,
		"evictionHard":                  map[string]string{"memory.available": "0%", "nodefs.available": "0%", "imagefs.available": "0%", "nodefs.inodesFree": "0%"},
		"imageGCHighThresholdPercent":   100,
		"failSwapOn":                    false,
		"resolvConf":                    "",
		"clusterDNS":                    []string{dnsAddress().String()},
		"clusterDomain":                 "cluster.local",
		"nodeStatusUpdateFrequency":     "1s",
		"nodeStatusReportFrequency":     "1s",
		"nodeLeaseDurationSeconds":      10,
		"syncFrequency":                 "5s",
		"fileCheckFrequency":            "1s",
		"volumeStatsAggPeriod":          "0s",
		"configMapAndSecretChangeDetectionStrategy": "Watch",
		"shutdownGracePeriod":                       "0s",
		"healthzPort":                               10248,
	}
}

// kernelParameters returns the kernel parameters that kubelet requires; it reads them from files
// that are mounted over the real ones.
func kernelParameters() map[string]string {
	return map[string]string{
		"vm/overcommit_memory":      "1",
		"vm/panic_on_oom":           "0",
		"kernel/panic":              "10",
		"kernel/panic_on_oops":      "1",
		"kernel/keys/root_maxkeys":  "1000000",
		"kernel/keys/root_maxbytes": "25000000",
	}
}

// shadow mounts a file with this content over a file of the machine.
func (n *Node) shadow(t T, path, text string) {
	file := filepath.Join("/var/lib/kubelet/.shadow", strings.ReplaceAll(path, "/", "_"))
	assert.NoError(t, n.WriteFile(file, text+"\n", 0o644))
	assert.NoError(t, n.Run(t.Context(), "mount", "--bind", file, path))
}

// StartKubelet starts the node's kubelet.
func (n *Node) StartKubelet() error {
	addresses := strings.Trim(strings.ReplaceAll(fmt.Sprint(n.Addresses), " ", ","), "[]")
	_, err := n.StartDaemon("kubelet", nil, filepath.Join(n.cluster.options.Binaries.Kubernetes, "kubelet"),
		"--config=/var/lib/kubelet/config.json", "--kubeconfig="+n.kubeconfig,
		"--hostname-override="+n.Name, "--node-ip="+addresses, "--v=2")
	return err
}

// prepareKubelet writes the files of kubelet.
func (n *Node) prepareKubelet(t T, a *authority) {
	serving := a.server(t, n.Name+"-kubelet", []string{n.Name}, n.Address)
	n.kubeconfig = a.kubeconfig(t, n.cluster.plane.url, "system:node:"+n.Name, "system:nodes")
	settings := assert.Must(json.MarshalIndent(n.kubeletSettings(a, serving), "", "  "))(t)
	assert.NoError(t, n.WriteFile("/var/lib/kubelet/config.json", string(settings), 0o644))
	for path, value := range kernelParameters() {
		n.shadow(t, "/proc/sys/"+path, value)
	}
}

// StartProxy starts the node's kube-proxy without the connection tracking settings that are not
// per network namespace.
func (n *Node) StartProxy() error {
	_, err := n.StartDaemon("kube-proxy", nil, filepath.Join(n.cluster.options.Binaries.Kubernetes, "kube-proxy"),
		"--kubeconfig="+n.cluster.proxyConfig, "--hostname-override="+n.Name,
		"--proxy-mode="+n.cluster.options.ProxyMode, "--cluster-cidr="+n.cluster.both(podNetwork(), podNetwork6()),
		"--conntrack-max-per-core=0", "--conntrack-min=0",
		"--conntrack-tcp-timeout-established=0s", "--conntrack-tcp-timeout-close-wait=0s",
		"--iptables-min-sync-period=100ms", "--v=2")
	return err
}
