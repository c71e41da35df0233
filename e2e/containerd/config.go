// SPDX-License-Identifier: Apache-2.0

package containerd

import "fmt"

const (
	socket     = "/run/containerd/containerd.sock"
	configPath = "/etc/containerd/config.toml"
	// crictlConfig has its own name, because the machine shares /etc.
	crictlConfig = "/etc/containerd/crictl.yaml"
	confDir      = "/etc/cni/net.d"
	binDir       = "/opt/cni/bin"
)

// config returns containerd's configuration for the major version. It differs from the defaults
// where a test machine needs it: containerd must not raise OOM scores, load AppArmor profiles or
// pull a sandbox image. The shim has a path, because PATH may have another version's first.
func config(major int, shim, runc string) string {
	version, plugin, sandbox, dirs := 2, "io.containerd.grpc.v1.cri", fmt.Sprintf("sandbox_image = %q", PodImage), fmt.Sprintf("bin_dir = %q", binDir)
	further := ""
	if major >= 2 {
		version, plugin, sandbox, dirs = 3, "io.containerd.cri.v1.runtime", "", fmt.Sprintf("bin_dirs = [%q]", binDir)
		further = fmt.Sprintf(`
[plugins."io.containerd.cri.v1.images".pinned_images]
  sandbox = %q

[plugins."io.containerd.nri.v1.nri"]
  disable = true
`, PodImage)
	}
	return fmt.Sprintf(`version = %d

[plugins.%[2]q]
  %s
  restrict_oom_score_adj = true
  disable_apparmor = true
  netns_mounts_under_state_dir = true

  [plugins.%[2]q.containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    runtime_path = %[4]q
    [plugins.%[2]q.containerd.runtimes.runc.options]
      BinaryName = %[5]q

  [plugins.%[2]q.cni]
    conf_dir = %[6]q
    %[7]s
%[8]s`, version, plugin, sandbox, shim, runc, confDir, dirs, further)
}
