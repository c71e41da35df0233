// SPDX-License-Identifier: Apache-2.0

package containerd

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/machine"
	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

// DirVariable is the environment variable with the directory of a built containerd, ctr, shim and
// crictl; tools/cached prints that directory.
const DirVariable = "IPMASQ_CONTAINERD_DIR"

// Debian is the directory of Debian's containerd, for Options.
const Debian = "/usr/bin"

// Options select and configure a containerd.
type Options struct {
	// Programs is the directory of containerd, its shim and ctr; the default is that of DirVariable.
	Programs string
	// Env is added to the environment of containerd and so of the plugins.
	Env []string
	// Args are further arguments of containerd, such as --log-level.
	Args []string
}

// Runtime is a containerd on a machine.
type Runtime struct {
	Machine *machine.Machine
	// Version is the version that containerd reports, "1.6.20~ds1" or "2.4.2+unknown".
	Version string
	// Daemon is the current or last process.
	Daemon *machine.Daemon

	options Options
	crictl  string
}

// New starts containerd, waits until its CRI service answers, and imports PodImage. containerd ends with the machine.
func New(t topology.T, m *machine.Machine, options Options) *Runtime {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	dir := os.Getenv(DirVariable)
	if dir == "" {
		t.Fatalf("find containerd: %s is not set; `make e2e-runtimes` sets it", DirVariable)
	}
	if options.Programs == "" {
		options.Programs = dir
	}
	// crictl warns with each command if the file is missing.
	assert.NoError(t, m.WriteFile(crictlConfig, fmt.Sprintf("runtime-endpoint: unix://%s\nimage-endpoint: unix://%[1]s\ntimeout: 300\n", socket), 0o644))
	r := &Runtime{Machine: m, options: options, crictl: filepath.Join(dir, "crictl")}
	major := r.findVersion(ctx, t)
	runc := assert.Must(exec.LookPath("runc"))(t) // of the Debian package runc
	assert.NoError(t, m.WriteFile(configPath, config(major, r.program("containerd-shim-runc-v2"), runc), 0o644))
	assert.NoError(t, r.Start(ctx))
	assert.NoError(t, r.Import(ctx, image(ctx, t)))
	return r
}

func (r *Runtime) program(name string) string { return filepath.Join(r.options.Programs, name) }

func (r *Runtime) findVersion(ctx context.Context, t topology.T) (major int) {
	output := assert.Must(r.Machine.Command(ctx, r.program("containerd"), "--version").Output())(t)
	found := regexp.MustCompile(` v?((\d+)\.\d\S*)`).FindSubmatch(output)
	if found == nil {
		t.Fatalf("containerd's version has no number: %q", output)
	}
	r.Version = string(found[1])
	return assert.Must(strconv.Atoi(string(found[2])))(t)
}

// Start starts containerd again, after Stop, Kill or the machine's Reboot.
func (r *Runtime) Start(ctx context.Context) error {
	args := append([]string{"--config", configPath}, r.options.Args...)
	var err error
	r.Daemon, err = r.Machine.StartDaemon("containerd", r.options.Env, r.program("containerd"), args...)
	if err != nil {
		return err
	}
	return r.await(ctx)
}

// Stop ends containerd; pods keep running.
func (r *Runtime) Stop() error { return r.Daemon.Stop(10 * time.Second) }

// Kill ends containerd with SIGKILL; pods keep running.
func (r *Runtime) Kill() error { return r.Daemon.Kill() }

// Restart is Stop and Start.
func (r *Runtime) Restart(ctx context.Context) error {
	if err := r.Stop(); err != nil {
		return err
	}
	return r.Start(ctx)
}

// await waits until CRI answers.
func (r *Runtime) await(ctx context.Context) error {
	const patience = 30 * time.Second
	last := "its socket is not there"
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); {
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for containerd: %w: %s", ctx.Err(), last)
		case <-r.Daemon.Done():
			return fmt.Errorf("wait for containerd: containerd has ended: %w\n%s", r.Daemon.Err(), r.Daemon.Output())
		case <-time.After(20 * time.Millisecond):
		}
		if _, err := os.Stat(r.Machine.Path(socket)); err != nil {
			continue
		}
		answer, err := r.Crictl(ctx, "info")
		if err != nil {
			return err
		}
		if answer.ExitCode == 0 {
			return nil
		}
		last = answer.Stderr
	}
	return fmt.Errorf("wait for containerd: no answer within %s: %s\n%s", patience, last, r.Daemon.Output())
}

// Crictl runs crictl on the machine. The error is nil for any exit code.
func (r *Runtime) Crictl(ctx context.Context, args ...string) (topology.Result, error) {
	c := r.Machine.Command(ctx, r.crictl, append([]string{"--config", crictlConfig}, args...)...)
	var stdout, stderr bytes.Buffer
	c.Stdout, c.Stderr = &stdout, &stderr
	err := c.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		return topology.Result{}, fmt.Errorf("run crictl: %w", err)
	}
	return topology.Result{Stdout: stdout.String(), Stderr: stderr.String(), ExitCode: c.ProcessState.ExitCode()}, nil
}

// ask is Crictl with an error for any exit code except 0.
func (r *Runtime) ask(ctx context.Context, args ...string) (string, error) {
	answer, err := r.Crictl(ctx, args...)
	if err == nil && answer.ExitCode != 0 {
		err = fmt.Errorf("crictl %s: exit code %d: %s", args[0], answer.ExitCode, answer.Stderr)
	}
	return answer.Stdout, err
}

// Import loads the images of an OCI archive into CRI.
func (r *Runtime) Import(ctx context.Context, archive []byte) error {
	c := r.Machine.Command(ctx, r.program("ctr"), "--address", socket, "--namespace", "k8s.io",
		"images", "import", "--all-platforms", "-")
	c.Stdin = bytes.NewReader(archive)
	if output, err := c.CombinedOutput(); err != nil {
		return fmt.Errorf("import images: %w: %s", err, output)
	}
	return nil
}

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

// Condition is a CRI condition from which a kubelet derives the node's readiness.
type Condition struct {
	Type    string
	Status  bool
	Message string
}

// NetworkReady returns the current condition of the network. containerd 2 calls STATUS for each
// request if the conflist has cniVersion 1.1.0.
func (r *Runtime) NetworkReady(ctx context.Context, t topology.T) Condition {
	t.Helper()
	text := assert.Must(r.ask(ctx, "info"))(t)
	var status struct {
		Status struct{ Conditions []Condition } `json:"status"`
	}
	assert.NoError(t, json.Unmarshal([]byte(text), &status))
	i := slices.IndexFunc(status.Status.Conditions, func(c Condition) bool { return c.Type == "NetworkReady" })
	if i < 0 {
		t.Fatalf("read CRI status: no condition of the network: %s", text)
	}
	return status.Status.Conditions[i]
}
