// SPDX-License-Identifier: Apache-2.0

package containerd

import (
	"fmt"
	"strconv"
	"strings"
)

const (
	socket     = "/run/containerd/containerd.sock"
	configPath = "/etc/containerd/config.toml"
	// crictlConfig has its own name, because the machine shares /etc.
	crictlConfig = "/etc/containerd/crictl.yaml"
	confDir      = "/etc/cni/net.d"
)

// config returns containerd's configuration for the major version. It differs from the defaults
// where a test machine needs it: containerd must not raise OOM scores, load AppArmor profiles or
// pull a sandbox image. The shim has a path, because PATH may have another version's first.
func config(major int, shim, runc string, binDirs []string) (string, error) {
	if major >= 2 {
		quoted := make([]string, len(binDirs))
		for i, dir := range binDirs {
			quoted[i] = strconv.Quote(dir)
		}
		return fmt.Sprintf(`version = 3

[plugins."io.containerd.cri.v1.images".pinned_images]
  sandbox = %q

[plugins."io.containerd.cri.v1.runtime"]
  restrict_oom_score_adj = true
  disable_apparmor = true
  netns_mounts_under_state_dir = true

  [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    runtime_path = %q
    [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
      BinaryName = %q

  [plugins."io.containerd.cri.v1.runtime".cni]
    conf_dir = %q
    bin_dirs = [%s]

[plugins."io.containerd.nri.v1.nri"]
  disable = true
`, PodImage, shim, runc, confDir, strings.Join(quoted, ", ")), nil
	}
	if len(binDirs) != 1 {
		return "", fmt.Errorf("configure containerd %d: it takes one directory of plugins, not %q", major, binDirs)
	}
	return fmt.Sprintf(`version = 2

[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = %q
  restrict_oom_score_adj = true
  disable_apparmor = true
  netns_mounts_under_state_dir = true

  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    runtime_path = %q
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
      BinaryName = %q

  [plugins."io.containerd.grpc.v1.cri".cni]
    conf_dir = %q
    bin_dir = %q
`, PodImage, shim, runc, confDir, binDirs[0]), nil
}
