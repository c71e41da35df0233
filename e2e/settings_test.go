// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// settingsFile writes reconciler.toml atomically, as configuration management does, and returns its
// path.
func (n *node) settingsFile(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(n.dir, "etc", "reconciler.toml")
	must(t, errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path+".next", []byte(text), 0o644), os.Rename(path+".next", path)))
	return path
}

// exemptSettings returns a reconciler.toml whose policy exempts a prefix. Its interval is long
// enough never to trigger a sync.
func exemptSettings(prefix string) string {
	return fmt.Sprintf("resync_interval = \"1h\"\n[agent]\nnonMasqueradeCIDRs = [%q]\n", prefix)
}

// TestBrokenSettingsAtStart checks that the reconciler runs with the settings of its flags.
func TestBrokenSettingsAtStart(t *testing.T) {
	t.Parallel()
	n := newNode(t, backends()[0])
	all, m := n.externalHost(t), n.configMap(t, validConfigMap())
	path := n.settingsFile(t, "resync_interval = \"1h\"\n[agent]\nnonMasqueradeCIDRs = [\"10.9.0.0/33\"]\n")
	d := n.startReconciler(t, "--config", path, "--agent-config-dir", m.dir)
	d.untilUnready(t, "settings: ", path+":3", "nonMasqueradeCIDRs[0]", "10.9.0.0/33")
	if code, body, err := d.get(d.healthAddress, "/livez"); err != nil || code != http.StatusOK {
		t.Errorf("/livez: %d %s %v", code, body, err)
	}
	n.wantValidPolicy(t, all)
	n.settingsFile(t, exemptSettings("20.0.0.0/8"))
	d.untilReady(t)
	n.wantValidPolicy(t, all)
	all.verdicts(t, n, false, map[string]string{"pod": "20.1.1.1"})
}

// TestSettingsChange checks that changes of the file take effect without a restart, whether it is
// renamed or written in place, and however quickly changes follow one another.
func TestSettingsChange(t *testing.T) {
	t.Parallel()
	n := newNode(t, backends()[0])
	all := n.externalHost(t)
	path := n.settingsFile(t, exemptSettings("20.0.0.0/8"))
	d := n.startReconciler(t, "--config", path).untilReady(t)
	soon := func(prefix string) {
		t.Helper()
		n.eventually(t, prefix, func() bool { return strings.Contains(n.rules(t), prefix) })
	}
	for i := range 10 {
		prefix := fmt.Sprintf("20.%d.0.0/16", i)
		n.settingsFile(t, exemptSettings(prefix))
		soon(prefix)
	}
	// Written in place, the file is empty for a moment, which is valid.
	for i := range 10 {
		prefix := fmt.Sprintf("21.%d.0.0/16", i)
		must(t, os.WriteFile(path, nil, 0o644))
		time.Sleep(time.Duration(i) * 3 * time.Millisecond)
		must(t, os.WriteFile(path, []byte(exemptSettings(prefix)), 0o644))
		soon(prefix)
	}
	// Many changes in a row.
	for i := range 30 {
		n.settingsFile(t, exemptSettings(fmt.Sprintf("22.%d.0.0/16", i)))
		time.Sleep(time.Duration(i%7) * 5 * time.Millisecond)
	}
	soon("22.29.0.0/16")
	all.verdicts(t, n, false, map[string]string{"pod": "22.29.1.1"})

	m := n.configMap(t, validConfigMap())
	n.settingsFile(t, fmt.Sprintf("agent_config_dir = %q\n", m.dir))
	soon("1.2.3.0/24")
	n.wantValidPolicy(t, all)
	n.settingsFile(t, fmt.Sprintf("agent_config_dir = %q\n[agent]\nmasqChain = \"OTHER\"\n", m.dir))
	soon("masq-OTHER")
	n.wantJumps(t, "OTHER", 1, 0)
	n.wantJumps(t, "IP-MASQ-AGENT", 0, 0)
	n.wantValidPolicy(t, all)
	d.untilReady(t)
	n.settingsFile(t, exemptSettings("22.0.0.0/8")+"[conflist]\nmanage = true\n")
	d.untilUnready(t, "conflist: waiting for the main CNI plugin's network in "+n.cni.ConfDir)
	n.settingsFile(t, exemptSettings("22.0.0.0/8"))
	d.untilReady(t)
	if stale := strings.Count(d.log(), "source updated"); stale < 20 {
		t.Errorf("the log has %d changes of settings", stale)
	}
}

// TestSettingsChangeAddresses checks that the listeners follow the addresses in the file.
func TestSettingsChangeAddresses(t *testing.T) {
	t.Parallel()
	n := newNode(t, backends()[0])
	first, second := n.unusedAddress(), n.unusedAddress()
	path := n.settingsFile(t, fmt.Sprintf("health_listen = %q\n", first))
	c := n.reconcilerCommand(t.Context(), t, "run", "--config", path)
	must(t, c.Start())
	defer func() { must(t, c.Process.Kill()); _ = c.Wait() }()
	n.eventually(t, "the first address", func() bool { return n.isReady(first) })
	n.settingsFile(t, fmt.Sprintf("health_listen = %q\n", second))
	n.eventually(t, "the second address", func() bool { return n.isReady(second) })
	if n.isReady(first) {
		t.Error("the reconciler still listens on the first address")
	}
	n.settingsFile(t, fmt.Sprintf("health_listen = %q\n", first))
	n.eventually(t, "the first address again", func() bool { return n.isReady(first) })
}
