// SPDX-License-Identifier: Apache-2.0

package machine_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/machine"
	"github.com/ip-masq/ip-masq-cni/e2e/sandbox"
	"github.com/ip-masq/ip-masq-cni/e2e/timelimit"
	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

// shell runs a script on a machine and returns its output.
func shell(t *testing.T, m *machine.Machine, script string) string {
	t.Helper()
	return strings.TrimSpace(assert.Output(t, m.Command(t.Context(), "sh", "-c", script)))
}

// TestClose checks that child processes of daemons and the cgroups end with the machine.
func TestClose(t *testing.T) {
	world := topology.New(t, topology.Options{})
	m := machine.New(t, world.Node)
	d := assert.Must(m.StartDaemon("leaver", []string{"WORD=hello"}, "sh", "-c", "setsid sleep 987 & echo $WORD; exec sleep 986"))(t)
	child := ""
	if !timelimit.Await(timelimit.Wait, func() bool {
		child = shell(t, m, "grep -slz ^987 /proc/[0-9]*/cmdline; true")
		return child != ""
	}) {
		t.Fatal("the daemon's child does not run")
	}
	shell(t, m, "for c in /sys/fs/cgroup/*"+m.Cgroup+"; do mkdir $c/below; done")
	if err := d.Stop(time.Second); err != nil {
		t.Errorf("stop: %v", err)
	}
	assert.Equal(t, "log", d.Output(), "hello\n")
	if got := shell(t, m, "grep -slz ^987 /proc/[0-9]*/cmdline; true"); got != child {
		t.Errorf("the daemon's child is %q, was %q", got, child)
	}
	pid := m.Pid()
	assert.NoError(t, m.Close())
	// The process is no child of this one, so /proc is checked.
	if left, err := filepath.Glob(fmt.Sprintf("/proc/%d", pid)); err != nil || len(left) > 0 {
		t.Errorf("process 1 is left: %v %v", left, err)
	}
	commands := assert.Must(filepath.Glob("/proc/[0-9]*/cmdline"))(t)
	for _, path := range commands {
		if text, err := os.ReadFile(path); err == nil && strings.HasPrefix(string(text), "sleep\x00987") {
			t.Errorf("%s is left", path)
		}
	}
	if left, err := filepath.Glob("/sys/fs/cgroup/*" + m.Cgroup); err != nil || len(left) > 0 {
		t.Errorf("cgroups are left: %v %v", left, err)
	}
}

func TestMain(m *testing.M) { os.Exit(sandbox.Run(m)) }
