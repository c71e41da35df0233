// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/timelimit"
	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// chaosTest changes the sources of a node at random while the plugin, the reconciler and
// third-party programs run. The sources are two networks, whose conflists are in the default
// directory, and a ConfigMap of agent files. They never conflict.
type chaosTest struct {
	*node
	random  *rand.Rand
	daemon  *daemon
	config  *configMap
	commits *commitWatcher
	pods    int
	counts  map[string]int

	// guarded is whether the networks' entries state guard, staleConnections and enforceExempt for
	// the host in transit.
	guarded bool

	lastValid        map[string]object // last valid keys of each source
	serial           int
	invalidConflists map[string]bool // by network
	invalidConfigMap bool

	pluginRuns sync.WaitGroup
	slots      chan struct{} // limits the concurrent runs of the plugin
	mu         sync.Mutex
	failures   []string
}

// agentFilesName is the name of the agent files in lastValid.
const agentFilesName = "the agents' files"

func (m *chaosTest) networks() []string { return []string{"podnet", "othernet"} }

func newChaosTest(t *testing.T, n *node, seed uint64, guarded bool) *chaosTest {
	t.Helper()
	// On a slow machine each run holds the lock for longer. The number of runs is such that a run
	// waits for at most a tenth of its time limit.
	concurrent := max(2, int(16/timelimit.Factor()))
	m := &chaosTest{node: n, guarded: guarded, slots: make(chan struct{}, concurrent), random: rand.New(rand.NewPCG(seed, 3)), lastValid: map[string]object{}, invalidConflists: map[string]bool{}, counts: map[string]int{}}
	must(t, os.MkdirAll(n.own(config.DefaultCNIConfDir), 0o755))
	m.config = n.configMap(t, nil)
	for _, name := range append(m.networks(), agentFilesName) {
		m.updateSource(t, name)
	}
	t.Cleanup(func() {
		for _, name := range m.networks() {
			_ = os.Remove(m.conflistPath(name)) // it may have been removed already
		}
	})
	m.daemon = n.startReconciler(t, m.args()...).untilReady(t)
	m.commits = n.watchCommits(t)
	return m
}

func (m *chaosTest) conflistPath(network string) string {
	return filepath.Join(m.own(config.DefaultCNIConfDir), "10-"+network+".conflist")
}

// args returns a command of the reconciler with the flags of the test's directories.
func (m *chaosTest) args(command ...string) []string {
	return append(command, "--cni-conf-dir", config.DefaultCNIConfDir, "--agent-config-dir", m.config.dir, "--resync-interval", "1h")
}

// writeAtomically writes a file by a temporary file and a rename.
func writeAtomically(t *testing.T, path, text string) {
	t.Helper()
	must(t, errors.Join(os.WriteFile(path+".next", []byte(text), 0o644), os.Rename(path+".next", path)))
}

// updateSource writes random valid keys to a source.
func (m *chaosTest) updateSource(t *testing.T, source string) {
	t.Helper()
	keys := m.randomKeys(source)
	m.lastValid[source] = keys
	if source != agentFilesName {
		list, err := json.Marshal(object{"cniVersion": "1.1.0", "name": source, "plugins": []object{m.bridge(source), m.entry(keys)}})
		must(t, err)
		writeAtomically(t, m.conflistPath(source), string(list))
		m.invalidConflists[source] = false
		return
	}
	exempt := keys["nonMasqueradeCIDRs"].([]string)
	files := map[string]string{}
	for name, part := range map[string]object{
		"ip-masq-agent": {"nonMasqueradeCIDRs": exempt[:1], "enableIPv6": true},
		"ip-masq-b":     {"nonMasqueradeCIDRs": exempt[1:], "MASQUERADEcidrs": keys["masqueradeCIDRs"]},
	} {
		text, err := json.Marshal(part)
		must(t, err)
		files[name] = string(text)
	}
	m.config.update(t, files)
	m.invalidConfigMap = false
}

// randomKeys returns keys for a source. The first prefix is unique. The other exempt prefixes have
// at most 24 bits (48 for IPv6), the masqueraded ones more, so that no two sources conflict. The
// first network exempts the destinations of the load.
func (m *chaosTest) randomKeys(source string) object {
	m.serial++
	r := m.random
	exempt := []string{fmt.Sprintf("21.%d.%d.0/24", m.serial/256, m.serial%256)}
	if source == m.networks()[0] {
		exempt = append(exempt, [][]string{
			{"10.0.0.0/8", "fd00::/8"}, {"10.9.0.0/16", "fd00:9::/48"}, {"10.9.0.0/17", "fc00::/6"}, {"8.0.0.0/5", "fd00:9::/32"},
			{"10.9.0.0/18", "10.9.64.0/18", "fd00::/16"},
		}[r.IntN(5)]...)
	}
	masquerade := []string{}
	for range r.IntN(8) {
		wide := netip.PrefixFrom(netip.AddrFrom4([4]byte{20, byte(r.IntN(8)), byte(r.IntN(256)), 0}), 14+r.IntN(11))
		exempt = append(exempt, wide.Masked().String())
		exempt = append(exempt, fmt.Sprintf("2001:db8:%d::/48", r.IntN(16)))
	}
	for range r.IntN(8) {
		narrow := netip.PrefixFrom(netip.AddrFrom4([4]byte{20, byte(r.IntN(8)), byte(r.IntN(256)), byte(r.IntN(256))}), 25+r.IntN(8))
		masquerade = append(masquerade, narrow.Masked().String())
		masquerade = append(masquerade, fmt.Sprintf("10.9.%d.0/25", 128+r.IntN(128)), fmt.Sprintf("2001:db8:%d:%d::/64", r.IntN(16), r.IntN(4)))
	}
	keys := object{"enableIPv6": true, "nonMasqueradeCIDRs": exempt, "masqueradeCIDRs": masquerade}
	if m.guarded && source != agentFilesName {
		maps.Copy(keys, object{"guard": "drop", "staleConnections": "reset", "enforceExempt": true,
			"podCIDRs": []string{transit4.String() + "/32", transit6.String() + "/128"}})
	}
	return keys
}

// tamper changes the rules as third-party programs do. It never masquerades an exempt destination,
// and removes no guard.
// The command may fail, because the rules change at the same time.
func (m *chaosTest) tamper(t *testing.T) {
	t.Helper()
	i := m.random.IntN(2)
	family := families()[i]
	host := []string{"198.51.100.7", "2001:db8:ffff::7"}[i]
	kinds := []string{
		"nft flush ruleset",
		"nft delete table " + family[1] + " ip-masq",
		"nft flush chain " + family[1] + " ip-masq postrouting",
		"nft flush chain " + family[1] + " ip-masq masq-IP-MASQ-AGENT",
		"nft insert rule " + family[1] + " ip-masq masq-IP-MASQ-AGENT " + family[1] + " daddr " + host + " return",
		"nft add rule " + family[1] + " ip-masq postrouting fib daddr type != local jump masq-IP-MASQ-AGENT",
		"nft add chain " + family[1] + " ip-masq strange",
		"nft add element " + family[1] + " ip-masq exempt-IP-MASQ-AGENT { " + host + " }",
	}
	if m.backend.variant != "" {
		kinds = []string{
			"nft flush ruleset",
			"nft delete table " + family[1] + " nat",
			family[0] + " -t nat -F",
			family[0] + " -t nat -F IP-MASQ-AGENT",
			family[0] + " -t nat -D POSTROUTING 1",
			family[0] + " -t nat -A POSTROUTING -m addrtype ! --dst-type LOCAL -j IP-MASQ-AGENT",
			family[0] + " -t nat -I IP-MASQ-AGENT -d " + host + " -j RETURN",
			family[0] + " -t nat -A IP-MASQ-AGENT -j ACCEPT",
		}
	}
	if m.guarded {
		kinds = kinds[1:] // flushing the ruleset removes the guard too
	}
	words := strings.Fields(kinds[m.random.IntN(len(kinds))])
	if words[0] != "nft" {
		words[0] = filepath.Join(m.dir, "bin", words[0])
	}
	_, _, _ = run(t, m.Node.Command(m.timeout(t), words[0], words[1:]...))
}

// allSourcesValid reports whether every source is valid.
func (m *chaosTest) allSourcesValid() bool {
	return !m.invalidConfigMap && !m.invalidConflists["podnet"] && !m.invalidConflists["othernet"]
}

// wantCheckCode returns the exit code of the command check on correct rules.
func (m *chaosTest) wantCheckCode() int {
	if m.allSourcesValid() {
		return 0
	}
	return 1
}

// waitForSources waits until all runs of the plugin end and the last valid keys of each source are
// stored.
func (m *chaosTest) waitForSources(t *testing.T) {
	t.Helper()
	m.pluginRuns.Wait()
	for source, keys := range m.lastValid {
		id := networkID(source)
		if source == agentFilesName {
			id = policy.SourceID{Kind: policy.AgentFiles}
		}
		want, _ := keys["nonMasqueradeCIDRs"].([]string)
		m.daemon.until(t, fmt.Sprintf("document of %s with %v", source, keys), func() bool {
			c := m.load(t).Find(id)
			if c == nil {
				return false
			}
			var stored []netip.Prefix
			for _, p := range c.Policies() {
				stored = append(stored, p.NonMasqueradeCIDRs...)
			}
			return len(want) == 0 == (len(stored) == 0) && (len(want) == 0 || slices.Contains(stored, netip.MustParsePrefix(want[0])))
		})
	}
}

// combinedPolicy returns the policy of all sources together, for the oracle.
func (m *chaosTest) combinedPolicy() oraclePolicy {
	p := oraclePolicy{ipv6: true}
	for _, keys := range m.lastValid {
		exempt, _ := keys["nonMasqueradeCIDRs"].([]string)
		masquerade, _ := keys["masqueradeCIDRs"].([]string)
		p.exempt = append(p.exempt, parsePrefixes(exempt...)...)
		p.masquerade = append(p.masquerade, parsePrefixes(masquerade...)...)
	}
	return p
}
