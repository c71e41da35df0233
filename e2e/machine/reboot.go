// SPDX-License-Identifier: Apache-2.0

package machine

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

// Reboot simulates a power failure and a start: every program is killed, /run is empty, netfilter
// has no rules and no connections, only links for which keep returns true remain, and the boot ID
// changes. Other files stay. The test starts the programs that run at boot.
func (m *Machine) Reboot(t topology.T, keep func(link string) bool) {
	t.Helper()
	// kill -1 spares process 1 and the shell. Processes that have ended are no error.
	m.run(t, "sh", "-c", "kill -9 -1; true")
	for _, d := range m.Daemons() {
		<-d.Done()
	}
	for _, link := range assert.Must(m.Netlink.LinkList())(t) {
		name := link.Attrs().Name
		if name == "lo" || keep(name) {
			continue
		}
		// Deleting one end of a veth pair deletes the other.
		if err := m.Netlink.LinkDel(link); err != nil && !errors.Is(err, unix.ENODEV) && !errors.Is(err, unix.EINVAL) {
			t.Fatalf("remove link %s: %v", name, err)
		}
	}
	m.flushRules(t)
	assert.NoError(t, m.FlushConntrack())
	assert.NoError(t, m.Enclose(emptyRun))
}

// emptyRun unmounts everything below /run, and /run, on its thread.
func emptyRun() error {
	mounts, err := os.ReadFile("/proc/1/mounts")
	if err != nil {
		return err
	}
	var points []string
	for line := range strings.Lines(string(mounts)) {
		point := strings.Fields(line)[1]
		if strings.HasPrefix(point, "/run/") {
			points = append(points, point)
		}
	}
	for _, point := range slices.Backward(points) {
		if err := unix.Unmount(point, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("unmount %s: %w", point, err)
		}
	}
	if err := unix.Unmount("/run", unix.MNT_DETACH); err != nil {
		return fmt.Errorf("unmount /run: %w", err)
	}
	if err := mountOwn("/run"); err != nil {
		return err
	}
	return nextBoot()
}

// nextBoot mounts a new boot ID over the current one.
func nextBoot() error {
	const kernels, ours = "/proc/sys/kernel/random/boot_id", "/run/boot_id"
	id, err := os.ReadFile("/proc/sys/kernel/random/uuid") // a new ID for each read
	if err != nil {
		return err
	}
	if err := os.WriteFile(ours, id, 0o444); err != nil {
		return err
	}
	// Nothing can be mounted over the file of the former boot, which is removed.
	if err := unix.Unmount(kernels, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("unmount boot id: %w", err)
	}
	if err := unix.Mount(ours, kernels, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("mount boot id: %w", err)
	}
	return os.Remove(ours) // the mount keeps it
}

// flushRules removes the rules of nf_tables, and those of iptables-legacy if it has tables; listing
// would create the latter.
func (m *Machine) flushRules(t topology.T) {
	m.run(t, "nft", "flush", "ruleset")
	for family, file := range map[string]string{"iptables": "ip_tables_names", "ip6tables": "ip6_tables_names"} {
		var tables []byte
		err := m.Do(func() error {
			var err error
			tables, err = os.ReadFile("/proc/thread-self/net/" + file)
			return err
		})
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		assert.NoError(t, err)
		for table := range strings.FieldsSeq(string(tables)) {
			for _, what := range []string{"-F", "-X"} {
				m.run(t, family+"-legacy", "-t", table, what)
			}
		}
	}
}
