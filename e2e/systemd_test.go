// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/timelimit"
)

const unitFile = "../deploy/systemd/ip-masq-reconciler.service"

// unit is a unit file as in systemd.syntax(7): values by section and key. An empty value resets the
// list before it.
type unit map[string]map[string][]string

func readUnit(t *testing.T) unit {
	t.Helper()
	u, section := unit{}, ""
	for line := range strings.Lines(string(readFile(t, unitFile))) {
		line = strings.TrimSpace(line)
		switch key, value, isPair := strings.Cut(line, "="); {
		case line == "" || line[0] == '#':
		case line[0] == '[' && line[len(line)-1] == ']':
			section = line[1 : len(line)-1]
			u[section] = map[string][]string{}
		case !isPair || section == "":
			t.Fatalf("%s: %q is neither a section nor a directive", unitFile, line)
		case value == "":
			u[section][key] = []string{}
		default:
			u[section][key] = append(u[section][key], value)
		}
	}
	return u
}

// words returns the values of a key that is a list.
func (u unit) words(key string) []string {
	return strings.Fields(strings.Join(u["Service"][key], " "))
}

// capabilities returns the unit's capabilities in the notation of setpriv.
func (u unit) capabilities(t *testing.T) []string {
	t.Helper()
	var all []string
	for _, c := range u.words("CapabilityBoundingSet") {
		name, found := strings.CutPrefix(c, "CAP_")
		if !found {
			t.Fatalf("CapabilityBoundingSet: %q", c)
		}
		all = append(all, strings.ToLower(name))
	}
	if len(all) == 0 || len(u.words("AmbientCapabilities")) > 0 || !slices.Equal(u.words("NoNewPrivileges"), []string{"yes"}) {
		t.Fatalf("capabilities %q, ambient %q, NoNewPrivileges %q", all, u.words("AmbientCapabilities"), u.words("NoNewPrivileges"))
	}
	return all
}

// withCapabilities prepends setpriv, which limits a program to these capabilities.
func withCapabilities(capabilities []string, command []string) []string {
	set := "-all"
	for _, c := range capabilities {
		set += ",+" + c
	}
	return append([]string{"setpriv", "--bounding-set", set, "--inh-caps", "-all", "--ambient-caps", "-all", "--no-new-privs", "--"}, command...)
}

// TestUnitCapabilities checks that the reconciler's commands work in every backend with the unit's
// capabilities, and that some backend needs each of them.
func TestUnitCapabilities(t *testing.T) {
	capabilities := readUnit(t).capabilities(t)
	// runCommands runs the commands on a new node with these capabilities.
	runCommands := func(t *testing.T, f backend, having []string) (says string, works bool) {
		t.Helper()
		n := newNode(t, f)
		n.conflist(t, "podnet", dualStack(nil))
		n.agentFile(t, "ip-masq-agent", "nonMasqueradeCIDRs: [192.0.2.0/24]\nenableIPv6: true\n")
		for _, command := range []string{"once", "check", "doctor"} {
			c := n.reconcilerCommand(n.timeout(t), t, command)
			all := withCapabilities(having, c.Args)
			prefix, err := exec.LookPath(all[0])
			must(t, err)
			c.Path, c.Args = prefix, all
			stdout, stderr, code := run(t, c)
			if says += stdout + stderr; code != 0 {
				return says, false
			}
		}
		n.wantJumps(t, "IP-MASQ-AGENT", 1, 1)
		return says, true
	}
	for _, f := range backends() {
		t.Run(f.name, func(t *testing.T) {
			if says, works := runCommands(t, f, capabilities); !works {
				t.Errorf("%s does not work with %q alone:\n%s", f.name, capabilities, says)
			}
		})
	}
	for i, without := range capabilities {
		t.Run("without "+without, func(t *testing.T) {
			var fail []string
			for _, f := range backends() {
				if _, works := runCommands(t, f, slices.Delete(slices.Clone(capabilities), i, i+1)); !works {
					fail = append(fail, f.name)
				}
			}
			want := map[string][]string{
				"net_admin": {"nftables", "iptables-nft", "iptables-legacy"},
				"net_raw":   {"iptables-legacy"},
			}[without]
			if !slices.Equal(fail, want) {
				t.Errorf("without CAP_%s fail %q, want %q", strings.ToUpper(without), fail, want)
			}
		})
	}
}

// service runs programs as systemd runs the unit: with its capabilities, on a file system that is
// read-only except for some directories.
type service struct {
	n            *node
	writable     []string
	capabilities []string
}

// start starts the program in its own mount namespace and returns a function that waits for it.
func (s service) start(t *testing.T, c *exec.Cmd) (wait func() error) {
	t.Helper()
	args := withCapabilities(s.capabilities, c.Args)
	path, err := exec.LookPath(args[0])
	must(t, err)
	c.Path, c.Args = path, args
	started, ended := make(chan error, 1), make(chan error, 1)
	go func() {
		// The thread stays locked and ends with the goroutine, because it has changed namespaces.
		runtime.LockOSThread()
		err := s.n.Node.Do(func() error { return errors.Join(remountReadOnlyExcept(s.writable), c.Start()) })
		started <- err
		if err == nil {
			ended <- c.Wait()
		}
	}()
	must(t, <-started)
	return func() error { return <-ended }
}

// remountReadOnlyExcept makes all file systems of the calling thread and its children read-only
// except for some directories.
func remountReadOnlyExcept(writable []string) error {
	if err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("make mount namespace: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	for _, dir := range writable {
		if err := unix.Mount(dir, dir, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
			return fmt.Errorf("bind %s: %w", dir, err)
		}
	}
	set := func(dir string, attributes unix.MountAttr) error {
		if err := unix.MountSetattr(unix.AT_FDCWD, dir, unix.AT_RECURSIVE, &attributes); err != nil {
			return fmt.Errorf("set mount attributes of %s (Linux 5.12 has this): %w", dir, err)
		}
		return nil
	}
	err := set("/", unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY})
	for _, dir := range writable {
		err = errors.Join(err, set(dir, unix.MountAttr{Attr_clr: unix.MOUNT_ATTR_RDONLY}))
	}
	return err
}

// command runs a command of the reconciler to its end.
func (s service) command(t *testing.T, args ...string) (output string, code int) {
	t.Helper()
	c, out := s.prepare(t, args...)
	err := s.start(t, c)()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return out.String(), c.ProcessState.ExitCode()
}

func (s service) prepare(t *testing.T, args ...string) (*exec.Cmd, *bytes.Buffer) {
	t.Helper()
	// Only the arguments are used: the node's command would start in other namespaces.
	words := s.n.reconcilerCommand(s.n.timeout(t), t, args...)
	ctx, cancel := timelimit.Context(context.WithoutCancel(t.Context()))
	t.Cleanup(cancel)
	c := exec.CommandContext(ctx, words.Path, words.Args[1:]...)
	c.Env = words.Env
	out := new(bytes.Buffer)
	c.Stdout, c.Stderr = out, out
	return c, out
}

// TestUnitPaths checks that the reconciler works with the directories that the unit makes writable,
// and that it needs each of them.
func TestUnitPaths(t *testing.T) {
	u := readUnit(t)
	if system := u.words("ProtectSystem"); !slices.Equal(system, []string{"strict"}) {
		t.Fatalf("ProtectSystem is %q", system)
	}
	writable := u.words("ReadWritePaths")
	for _, dir := range u.words("StateDirectory") {
		writable = append(writable, filepath.Join("/var/lib", dir))
	}
	// The last directory is the default data_dir, which the unit does not change.
	dataDir := writable[len(writable)-1]
	fresh := func(t *testing.T, f backend) service {
		t.Helper()
		n := newNode(t, f)
		n.dataDir = dataDir
		if err := os.MkdirAll(dataDir, 0o700); err != nil { // systemd creates it
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := os.RemoveAll(dataDir); err != nil {
				t.Error(err)
			}
		})
		n.conflist(t, "podnet", dualStack(nil))
		n.agentFile(t, "ip-masq-agent", "nonMasqueradeCIDRs: [192.0.2.0/24]\nenableIPv6: true\n")
		return service{n, writable, u.capabilities(t)}
	}
	for _, f := range backends() {
		t.Run(f.name, func(t *testing.T) {
			s := fresh(t, f)
			for _, command := range []string{"once", "check", "doctor", "once"} {
				if out, code := s.command(t, command); code != 0 {
					t.Fatalf("%s: exit code %d\n%s", command, code, out)
				}
			}
			s.n.wantJumps(t, "IP-MASQ-AGENT", 1, 1)
			s.checkRun(t)
		})
	}
	for i, without := range writable {
		t.Run("without "+without, func(t *testing.T) {
			var fail []string
			for _, f := range backends() {
				s := fresh(t, f)
				s.writable = slices.Delete(slices.Clone(writable), i, i+1)
				if _, code := s.command(t, "once"); code != 0 {
					fail = append(fail, f.name)
				}
			}
			if len(fail) == 0 {
				t.Errorf("%s is writable without need", without)
			}
			t.Logf("fail: %q", fail)
		})
	}
}

// checkRun checks that `run` becomes ready, repairs rules, and ends with exit code 0.
func (s service) checkRun(t *testing.T) {
	t.Helper()
	health := s.n.unusedAddress()
	c, out := s.prepare(t, "run", "--health-listen", health, "--metrics-listen", s.n.unusedAddress(), "--resync-interval", "1s")
	wait := s.start(t, c)
	client := s.n.httpClient()
	defer client.CloseIdleConnections()
	until := func(what string, is func() bool) {
		if !timelimit.Await(timelimit.Wait, is) {
			t.Errorf("no %s", what)
		}
	}
	until("readiness", func() bool {
		answer, err := client.Get("http://" + health + "/readyz")
		return err == nil && answer.Body.Close() == nil && answer.StatusCode == http.StatusOK
	})
	s.n.alter(t, "-F IP-MASQ-AGENT", "delete table ip ip-masq")
	until("repair", func() bool { return strings.Contains(s.n.rules(t), "192.0.2.0/24") })
	if err := c.Process.Signal(syscall.SIGTERM); err != nil {
		t.Error(err)
	}
	if err := wait(); err != nil || strings.Contains(out.String(), "level=ERROR") || strings.Contains(out.String(), "read-only") {
		t.Errorf("%v\n%s", err, out)
	}
}
