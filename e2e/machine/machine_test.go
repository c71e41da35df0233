// SPDX-License-Identifier: Apache-2.0

package machine_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/machine"
	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

// shell runs a script on a machine and returns its output.
func shell(t *testing.T, m *machine.Machine, script string) string {
	t.Helper()
	output, err := m.Command(t.Context(), "sh", "-c", script).CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v: %s", script, err, output)
	}
	return strings.TrimSpace(string(output))
}

func TestMachinesAreApart(t *testing.T) {
	world := topology.New(t, topology.Options{})
	one := machine.New(t, world.Node)
	two := machine.New(t, topology.Must(world.NewPod("two"))(t))
	for _, path := range machine.Own() {
		file := filepath.Join(path, "sub", "of-one")
		if err := one.WriteFile(file, "text", 0o600); err != nil {
			t.Fatal(err)
		}
		if got := shell(t, one, "cat "+file); got != "text" {
			t.Errorf("%s on the machine: %q", file, got)
		}
		if got := shell(t, two, "ls "+path); got != "" {
			t.Errorf("%s of the other machine has %q", path, got)
		}
		if _, err := os.Stat(filepath.Join(path, "sub")); !os.IsNotExist(err) {
			t.Errorf("%s outside: %v", file, err)
		}
	}
	shell(t, one, "mkdir /run/m && mount -t tmpfs m /run/m && ip link add dummy9 type veth peer name dummy8")
	if got := shell(t, two, "cat /proc/mounts; ip link"); strings.Contains(got, "/run/m") || strings.Contains(got, "dummy9") {
		t.Errorf("the other machine sees it:\n%s", got)
	}
	if got := shell(t, one, "ip link"); !strings.Contains(got, "outside") || !strings.Contains(got, "dummy9") {
		t.Errorf("not the network of the node:\n%s", got)
	}
	if got := shell(t, two, "cat /proc/1/comm; ls -d /sys/fs/cgroup"+"/*"+two.Cgroup); !strings.HasPrefix(got, "sh\n") || !strings.Contains(got, two.Cgroup) {
		t.Errorf("process 1 and cgroups: %s", got)
	}
}

// TestAnotherPIDNamespace checks that a machine's cgroups stay while a container with another PID
// namespace makes machines.
func TestAnotherPIDNamespace(t *testing.T) {
	m := machine.New(t, topology.New(t, topology.Options{}).Node)
	topology.Must(m.StartDaemon("stays", nil, "sh", "-c", "for c in /sys/fs/cgroup/*"+m.Cgroup+"; do echo $$ >$c/cgroup.procs; done; exec sleep 985"))(t)
	program := topology.Must(os.Executable())(t)
	c := exec.Command("unshare", "--pid", "--fork", "--mount-proc", program, "-test.run=^TestMachinesAreApart$", "-test.v")
	if out, err := c.CombinedOutput(); err != nil || !strings.Contains(string(out), "--- PASS: TestMachinesAreApart ") {
		t.Errorf("%v\n%s", err, out)
	}
	shell(t, m, "ls -d /sys/fs/cgroup/*"+m.Cgroup)
}

// TestClose checks that child processes of daemons and the cgroups end with the machine.
func TestClose(t *testing.T) {
	world := topology.New(t, topology.Options{})
	m := topology.Must(machine.Start(world.Node))(t)
	d := topology.Must(m.StartDaemon("leaver", []string{"WORD=hello"}, "sh", "-c", "setsid sleep 987 & echo $WORD; exec sleep 986"))(t)
	child := ""
	for deadline := time.Now().Add(10 * time.Second); child == "" && time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		child = shell(t, m, "grep -slz ^987 /proc/[0-9]*/cmdline; true")
	}
	if child == "" {
		t.Fatal("the daemon's child does not run")
	}
	shell(t, m, "for c in /sys/fs/cgroup/*"+m.Cgroup+"; do mkdir $c/below; done")
	if err := d.Stop(time.Second); err != nil {
		t.Errorf("stop: %v", err)
	}
	if d.Output() != "hello\n" {
		t.Errorf("log: %q", d.Output())
	}
	if got := shell(t, m, "grep -slz ^987 /proc/[0-9]*/cmdline; true"); got != child {
		t.Errorf("the daemon's child is %q, was %q", got, child)
	}
	pid := m.Pid()
	if err := m.Close(); err != nil {
		t.Error(err)
	}
	// The process is no child of this one, so /proc is checked.
	if left, err := filepath.Glob(fmt.Sprintf("/proc/%d", pid)); err != nil || len(left) > 0 {
		t.Errorf("process 1 is left: %v %v", left, err)
	}
	commands, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range commands {
		if text, err := os.ReadFile(path); err == nil && strings.HasPrefix(string(text), "sleep\x00987") {
			t.Errorf("%s is left", path)
		}
	}
	if left, err := filepath.Glob("/sys/fs/cgroup/*" + m.Cgroup); err != nil || len(left) > 0 {
		t.Errorf("cgroups are left: %v %v", left, err)
	}
}

func TestReboot(t *testing.T) {
	world := topology.New(t, topology.Options{})
	m := machine.New(t, world.Node)
	d := topology.Must(m.StartDaemon("sleep", nil, "sleep", "985"))(t)
	shell(t, m, `mkdir /run/deep && mount -t tmpfs m /run/deep && touch /run/file /var/lib/kubelet/kept
		ip link add cni0 type bridge
		nft add table ip mine
		iptables-legacy -t nat -N MINE && iptables-legacy -t nat -A POSTROUTING -j MINE`)
	const bootID = "cat /proc/sys/kernel/random/boot_id"
	before := shell(t, m, bootID)
	keep := func(link string) bool { return link == "lan" || link == "outside" }
	if err := m.Reboot(keep); err != nil {
		t.Fatal(err)
	}
	if err := d.Err(); err == nil || !strings.Contains(err.Error(), unix.SIGKILL.String()) {
		t.Errorf("daemon: %v, want it killed", err)
	}
	after := shell(t, m, bootID)
	if after == before || len(after) != len(before) {
		t.Errorf("boot id %s, was %s", after, before)
	}
	state := shell(t, m, "ls /run /var/lib/kubelet; nft list ruleset | grep mine; iptables-legacy-save | grep MINE; ip -o link | cut -d' ' -f2")
	want := "/run:\n\n/var/lib/kubelet:\nkept\nlo:\n"
	if !strings.HasPrefix(state, want) || strings.Contains(state, "cni0") || !strings.Contains(state, "outside@") {
		t.Errorf("after the reboot: %s", state)
	}
}
