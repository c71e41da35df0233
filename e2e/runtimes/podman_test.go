// SPDX-License-Identifier: Apache-2.0

//go:build e2e_runtimes

package runtimes

import (
	"fmt"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/containerd"
	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

// podmanRoot is the root file system of podman's containers, so that no image is needed.
const podmanRoot = "/var/lib/containers/rootfs"

// podman prepares podman on the node and returns a function that runs it.
func (n *node) podman(t *testing.T) runs {
	t.Helper()
	const conf = "/etc/containers/containers.conf"
	runc, code := n.ended(t, nil, "sh", "-c", "command -v runc")
	if code != 0 {
		t.Fatal("no runc")
	}
	must(t, n.WriteFile(conf, fmt.Sprintf(`[network]
network_backend = "cni"
cni_plugin_dirs = [%q]
network_config_dir = %q
[engine]
cgroup_manager = "cgroupfs"
events_logger = "none"
runtime = "runc"
[engine.runtimes]
runc = [%q]
[containers]
apparmor_profile = "unconfined"
log_driver = "k8s-file"
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
`, binDir, conflistDir, strings.TrimSpace(runc)), 0o644))
	must(t, n.WriteFile("/etc/containers/policy.json", `{"default": [{"type": "reject"}]}`, 0o644))
	must(t, n.WriteFile(filepath.Join(podmanRoot, "pod"), string(containerd.PodProgram(within(t), t)), 0o755))
	return func(args ...string) (string, int) {
		t.Helper()
		// conmon has a configured path; PATH is for the plugins.
		return n.ended(t, []string{"PATH=" + programDir, "CONTAINERS_CONF=" + conf, "HOME=/run", "TMPDIR=/run"},
			"podman", append([]string{"--cgroup-manager", "cgroupfs"}, args...)...)
	}
}

// runs runs podman.
type runs = func(args ...string) (output string, code int)

// podmanRun runs a container of the pod program.
func (n *node) podmanRun(t *testing.T, podman runs, name string) (*topology.Host, []netip.Addr) {
	t.Helper()
	all := []string{"run", "--detach", "--name", name, "--network", "pods", "--cgroup-parent", n.Cgroup, "--rootfs", podmanRoot, "/pod"}
	if output, code := podman(all...); code != 0 {
		t.Fatalf("run: exit code %d: %s", code, output)
	}
	const format = "{{.NetworkSettings.SandboxKey}} {{range .NetworkSettings.Networks}}{{.IPAddress}} {{.GlobalIPv6Address}}{{end}}"
	inspected, code := podman("inspect", "--format", format, name)
	fields := strings.Fields(inspected)
	if code != 0 || len(fields) != 3 {
		t.Fatalf("inspect: exit code %d: %s", code, inspected)
	}
	return n.adopt(t, n.Path(fields[0])), []netip.Addr{netip.MustParseAddr(fields[1]), netip.MustParseAddr(fields[2])}
}

func (n *node) podmanEnd(t *testing.T, podman runs, name string) {
	t.Helper()
	if output, code := podman("rm", "--force", "--time", "0", name); code != 0 {
		t.Fatalf("rm: exit code %d: %s", code, output)
	}
}

// TestPodman runs podman containers on the conflist with each backend.
func TestPodman(t *testing.T) {
	for _, f := range forms() {
		t.Run(f.name, func(t *testing.T) {
			n := newNode(t, f)
			n.conflist(t, bridge(), n.entry(prefixes()))
			podman := n.podman(t)
			host, addrs := n.podmanRun(t, podman, "pod")
			n.wantAttachments(t, 1)
			n.verdicts(t, host, addrs)
			n.podmanEnd(t, podman, "pod")
			n.wantAttachments(t, 0)
		})
	}
}
