// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/sandbox"
	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nftables"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

func TestMain(m *testing.M) { os.Exit(sandbox.Run(m)) }

// fixture is a node of its own in the kernel of the sandbox, which is empty at
// first, with files below a directory of its own.
type fixture struct {
	*testing.T
	*Node
	dir string
}

func newFixture(t *testing.T) *fixture {
	dir := t.TempDir()
	s := config.DefaultSettings()
	s.DataDir = filepath.Join(dir, "data")
	s.CNIConfDir = filepath.Join(dir, "net.d")
	f := &fixture{T: t, dir: dir}
	driver := nftables.New()
	f.Node = Open(s, filepath.Join(dir, "plugin.toml"), netfilter.Drivers{driver})
	f.nft("flush ruleset")
	must(t, os.Mkdir(s.CNIConfDir, 0o755))
	t.Cleanup(func() {
		f.nft("flush ruleset")
		assert.NoError(t, driver.Close())
	})
	return f
}

var must = assert.NoError

// withAgent makes the files of a directory a source.
func (f *fixture) withAgent() *fixture {
	f.Settings.AgentConfigDir = filepath.Join(f.dir, "config")
	must(f.T, os.Mkdir(f.Settings.AgentConfigDir, 0o755))
	return f
}

func (f *fixture) agentFile(text string) {
	f.Helper()
	f.file(filepath.Join(f.Settings.AgentConfigDir, "ip-masq-agent"), text)
}

func (f *fixture) file(path, text string) {
	f.Helper()
	must(f.T, os.WriteFile(path, []byte(text), 0o644))
}

// pluginFile writes a plugin.toml with the directories of the node, and a line.
func (f *fixture) pluginFile(line string) {
	f.Helper()
	f.file(f.PluginFile, fmt.Sprintf("data_dir = %q\ncni_conf_dir = %q\n%s\n", f.Dir.Path(), f.Settings.CNIConfDir, line))
}

// conflist writes the conflist of a network with a plugin entry.
func (f *fixture) conflist(network string, keys map[string]any) string {
	f.Helper()
	entry := map[string]any{"type": "ip-masq", "dataDir": f.Settings.DataDir}
	for k, v := range keys {
		entry[k] = v
	}
	text := assert.Must(json.Marshal(map[string]any{"cniVersion": "1.0.0", "name": network, "plugins": []any{map[string]any{"type": "ptp"}, entry}}))(f.T)
	path := filepath.Join(f.Settings.CNIConfDir, "10-"+network+".conflist")
	f.file(path, string(text))
	return path
}

func (f *fixture) nft(args ...string) string {
	f.Helper()
	return assert.Output(f, exec.Command("nft", args...))
}

func (f *fixture) sync() *Report {
	f.Helper()
	return f.Sync(f.Context(), f.Read())
}

// right syncs, after which the node has to be ready.
func (f *fixture) right() *Report {
	f.Helper()
	r := f.sync()
	if !r.Ready() {
		f.Fatalf("not ready: %v", problems(r))
	}
	return r
}

// problems returns all problems as one error, or nil.
func problems(r *Report) error {
	var errs []error
	for _, p := range r.Problems {
		errs = append(errs, p.Err)
	}
	return errors.Join(errs...)
}

// wants fails the test unless the sync came to the result, with problems that
// say all of this.
func (f *fixture) wants(r *Report, result Result, says ...string) {
	f.Helper()
	if r.Result != result {
		f.Errorf("result %s, want %s (%v)", r.Result, result, problems(r))
	}
	if len(says) == 0 && !r.Ready() {
		f.Errorf("not ready: %v", problems(r))
	}
	if len(says) > 0 {
		assert.ErrorContains(f, problems(r), says...)
	}
}

// verdicts holds the decisions in the kernel against what is wanted, by address.
func (f *fixture) exempts(want string) {
	f.Helper()
	out := f.nft("list", "set", "ip", "ip-masq", "exempt-IP-MASQ-AGENT")
	_, elements, _ := strings.Cut(out, "elements = {")
	elements, _, _ = strings.Cut(elements, "}")
	assert.Equal(f, "exempt", strings.Join(strings.Fields(elements), ""), want)
}

func (f *fixture) stored(network string) *policy.Source {
	f.Helper()
	s := assert.Must(f.Dir.Load())(f.T)
	return s.Find(policy.SourceID{Kind: policy.Network, Name: network})
}

// old puts a file's last change into the past.
func (f *fixture) old(paths ...string) {
	f.Helper()
	for _, path := range paths {
		then := time.Now().Add(-time.Hour)
		must(f.T, os.Chtimes(path, then, then))
	}
}

func (f *fixture) lock() *store.Lock {
	f.Helper()
	l := assert.Must(f.Dir.Lock(f.Context()))(f.T)
	return l
}
