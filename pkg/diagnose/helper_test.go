// SPDX-License-Identifier: Apache-2.0

package diagnose

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/policytest"
	"github.com/ip-masq/ip-masq-cni/e2e/sandbox"
	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

func TestMain(m *testing.M) { os.Exit(sandbox.Run(m)) }

// entry is a plugin entry in a conflist.
const entry = `{"type": "ip-masq"}`

// bridge is a main plugin as it should be.
const bridge = `{"type": "bridge", "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.244.1.0/24"}]], "routes": [{"dst": "0.0.0.0/0"}]}}`

func conflist(network string, plugins ...string) string {
	return `{"cniVersion": "1.0.0", "name": "` + network + `", "plugins": [` + strings.Join(plugins, ", ") + `]}`
}

// host is a node in the making: files below a root, policies, and what the
// kernel would say.
type testHost struct {
	t        *testing.T
	files    map[string]string
	policies []policy.SourcePolicy
	choice   netfilter.Choice
	edit     func(*Host)
}

// newHost is a node without findings.
func newHost(t *testing.T) *testHost {
	return &testHost{t: t,
		files: map[string]string{
			"etc/cni/net.d/10-pods.conflist": conflist("pods", bridge, entry),
			"proc/self/status":               "Name:\tx\nCapInh:\t0000000000000000\nCapEff:\t000001ffffffffff\n",
			"proc/sys/net/ipv4/ip_forward":   "1\n",
			"proc/1/cmdline":                 "/sbin/init\x00",
			"proc/7/cmdline":                 "/ip-masq-reconciler\x00run\x00",
			"proc/8/cmdline":                 "",
			"proc/stat":                      "",
			"proc/net/dev":                   "Inter-|   Receive\n face |bytes\n    lo:       0\n  eth0: 1\n  cni0: 2\n  wg0: 3\n",
		},
		policies: []policy.SourcePolicy{{Chain: policy.DefaultChain}},
		choice:   netfilter.Choice{Backend: policy.IPTables, Variant: netfilter.VariantNFT},
	}
}

// node writes the files and returns the node.
func (h *testHost) node() Host {
	h.t.Helper()
	root := h.t.TempDir()
	for name, text := range h.files {
		path := filepath.Join(root, name)
		assert.NoError(h.t, os.MkdirAll(filepath.Dir(path), 0o755))
		err := os.WriteFile(path, []byte(text), 0o644)
		if target, isLink := strings.CutPrefix(text, "-> "); isLink {
			err = errors.Join(os.Remove(path), os.Symlink(target, path))
		}
		assert.NoError(h.t, err)
	}
	n := Host{Root: root, Warnings: func(string) []error { return nil }, IPTablesVersion: func(string) string { return "1.8.9" }}
	n.ConfDir, n.ConfDirErr = config.ReadConfDir(filepath.Join(root, "etc/cni/net.d"))
	for i, s := range h.policies {
		n.State.Sources = append(n.State.Sources, policy.Source{
			ID: policy.SourceID{Kind: policy.Network, Name: []string{"pods", "other", "third"}[i]}, Policy: s, Order: int64(i)})
	}
	v := &enforce.State{}
	for _, p := range policy.Merge(n.State.Sources) {
		desired := policy.Desired([]policy.Policy{p}, policy.Layout{}, policy.Owner{})
		v.Chains = append(v.Chains, enforce.Chain{Policy: p, Choice: h.choice, Desired: desired, Observed: desired, Recorded: true})
	}
	v.Guard.Desired = policy.DesiredGuards(v.Policies(), policy.Owner{})
	n.Rules = v
	for _, p := range v.Policies() {
		n.State.Record.Chains = append(n.State.Record.Chains,
			store.OwnedChain{Chain: p.Chain, Family: policy.IPv4, Backend: h.choice.Backend, Variant: h.choice.Variant})
	}
	if h.edit != nil {
		h.edit(&n)
	}
	return n
}

func (h *testHost) examine() []Finding {
	h.t.Helper()
	return Examine(h.node())
}

var (
	isolate, feed = sandbox.NetworkNamespace, sandbox.Feed
	prefixes      = policytest.Prefixes
)
