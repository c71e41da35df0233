// SPDX-License-Identifier: Apache-2.0

//go:build e2e_cluster

package mainplugins

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
)

// restarts is how often a test restarts a main CNI plugin's program.
const restarts = 3

// TestWriters installs ip-masq beside each main CNI plugin, whose program is then restarted, and
// uninstalls it. It checks the plugin entry, the packets of pods that start before, in between and
// after, and what doctor finds.
func TestWriters(t *testing.T) {
	for _, w := range Writers() {
		t.Run(w.Name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, w.version(), w.Needs)
			n.beside(t, w.File, func() { must(t, w.Start(n.Path(confDir))) })
		})
	}
}

// version returns the cniVersion of the conflist.
func (w Writer) version() string {
	_, after, _ := strings.Cut(w.Conflist, `"cniVersion": "`)
	version, _, _ := strings.Cut(after, `"`)
	return version
}

// beside installs ip-masq beside a main CNI plugin, restarts the program that writes the conflist,
// and uninstalls ip-masq. doctor may have these findings.
func (n *node) beside(t *testing.T, file string, start func(), findings ...string) {
	t.Helper()
	start()
	conflist := assert.Must(os.ReadFile(n.Path(filepath.Join(confDir, file))))(t)
	n.pod(t, "before", false)
	n.run(t)
	n.untilEntry(t, file)
	n.untilReady(t)
	n.untilHealthy(t, findings...)
	n.pod(t, "between", true)
	for i := range restarts {
		start()
		t.Logf("the entry is back after %s", n.untilEntry(t, file).Round(time.Millisecond))
		n.untilReady(t)
		n.pod(t, fmt.Sprint("restart", i), true)
	}
	n.untilHealthy(t, findings...)
	n.packets(t, true)
	must(t, n.reconciler.Stop(10*time.Second))
	if log := n.reconciler.Output(); strings.Contains(log, "level=ERROR") {
		t.Errorf("the reconciler logged an error:\n%s", log)
	}
	if output, code := n.command(t, "uninstall"); code != 0 {
		t.Errorf("uninstall: exit code %d: %s", code, output)
	}
	n.wantGone(t, file, string(conflist))
	n.packets(t, false)
	n.endPods(t)
	n.pod(t, "after", false)
	n.endPods(t)
}
