// SPDX-License-Identifier: Apache-2.0

//go:build e2e_packages

package packages

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/timelimit"
)

// boot is what the kernel and an initrd do before they start systemd, in namespaces of its own, except the
// network's. Of version 1 only the hierarchy without controllers is mounted.
const boot = `set -e
mount --make-rprivate /
mount --bind . .
cd "$PWD"
mount -t proc proc proc
mount -t tmpfs tmpfs run
mount -t tmpfs tmpfs tmp
mount -t sysfs sysfs sys
if [ "$CGROUP_VERSION" = 2 ]; then
	mount -t cgroup2 cgroup2 sys/fs/cgroup
else
	mount -t tmpfs tmpfs sys/fs/cgroup
	mkdir sys/fs/cgroup/systemd
	mount -t cgroup -o none,name=systemd cgroup sys/fs/cgroup/systemd
fi
mount -t tmpfs -o mode=755 tmpfs dev
for device in null zero full random urandom tty; do
	: >dev/$device
	mount --bind /dev/$device dev/$device
done
mkdir dev/pts dev/shm
mount -t devpts -o newinstance,ptmxmode=0666,mode=620 devpts dev/pts
ln -s pts/ptmx dev/ptmx
mount --move . /
exec chroot . env -i container=other PATH=/usr/sbin:/usr/bin:/sbin:/bin /lib/systemd/systemd --show-status=no
`

// bootSystemd starts the machine's systemd and waits until it has started its units.
func (m *machine) bootSystemd(t *testing.T) {
	t.Helper()
	root, version := "/sys/fs/cgroup", "2"
	if _, err := os.Stat(filepath.Join(root, "cgroup.controllers")); err != nil {
		root, version = filepath.Join(root, "systemd"), "1"
	}
	cgroup := filepath.Join(root, fmt.Sprintf("ip-masq-packages-%d", os.Getpid()))
	must(t, os.Mkdir(cgroup, 0o755))
	// systemd takes the cgroup in which it starts for the root.
	c := exec.Command("/bin/sh", "-c", `echo $$ >"$CGROUP/cgroup.procs" && cd "$ROOT" &&
		exec unshare --mount --pid --fork --kill-child --ipc --uts --cgroup /bin/sh -c "$BOOT"`)
	c.Env = append(os.Environ(), "CGROUP="+cgroup, "CGROUP_VERSION="+version, "ROOT="+m.root, "BOOT="+boot)
	c.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out := assert.Must(os.Create(filepath.Join(t.TempDir(), "console")))(t)
	c.Stdout, c.Stderr = out, out
	must(t, c.Start())
	t.Cleanup(func() {
		must(t, c.Process.Kill())
		var exit *exec.ExitError
		if err := c.Wait(); err != nil && !errors.As(err, &exit) {
			t.Error(err)
		}
		removeCgroup(t, cgroup)
	})
	var last string
	if !timelimit.Await(2*time.Minute, func() bool {
		if m.systemd == 0 {
			children, _ := os.ReadFile(fmt.Sprintf("/proc/%[1]d/task/%[1]d/children", c.Process.Pid))
			pid, _ := strconv.Atoi(strings.TrimSpace(string(children)))
			if name, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid)); string(name) == "systemd\n" {
				m.systemd = pid
			}
			return false
		}
		// What a container lacks, such as a console, is "degraded".
		last, _ = m.try("systemctl is-system-running")
		return last == "running\n" || last == "degraded\n"
	}) {
		console, _ := os.ReadFile(out.Name())
		t.Fatalf("systemd does not run: %q\n%s", last, console)
	}
}

const journal = "journalctl --no-pager -u ip-masq-reconciler"

// removeCgroup removes a cgroup whose processes are ending.
func removeCgroup(t *testing.T, top string) {
	t.Helper()
	var out []byte
	if !timelimit.Await(20*time.Second, func() (removed bool) {
		var err error
		out, err = exec.Command("find", top, "-depth", "-type", "d", "-exec", "rmdir", "{}", "+").CombinedOutput()
		return err == nil
	}) {
		t.Errorf("remove the cgroup:\n%s", out)
	}
}

// pid returns the process of the service, after it has become ready.
func (m *machine) pid(t *testing.T, version string) string {
	t.Helper()
	const ask = "systemctl show --property MainPID --property ActiveState --property NRestarts ip-masq-reconciler"
	var status string
	if !timelimit.Await(time.Minute, func() bool {
		var err error
		status, err = m.try("ip-masq-reconciler status")
		return err == nil && strings.Contains(status, version)
	}) {
		t.Fatalf("the service of %s is not ready:\n%s\n%s\n%s", version, status, m.run(t, ask), m.run(t, journal))
	}
	state := m.run(t, ask)
	if !strings.Contains(state, "ActiveState=active\n") || !strings.Contains(state, "NRestarts=0\n") {
		t.Errorf("the service is\n%s", state)
	}
	_, pid, _ := strings.Cut(state, "MainPID=")
	pid, _, _ = strings.Cut(pid, "\n")
	return pid
}
