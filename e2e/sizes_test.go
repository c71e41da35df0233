// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/containernetworking/cni/pkg/skel"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/pkg/agentconfig"
	"github.com/ip-masq/ip-masq-cni/pkg/cniplugin"
	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/reconcile"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// scalingCase is an operation on input whose size is not under the project's control.
type scalingCase struct {
	name string
	n    int
	// prepare returns the operation on input of n items.
	prepare func(t *testing.T, n int) func()
}

// cpuTime returns the processor time that the process has used so far.
func cpuTime(t *testing.T) time.Duration {
	t.Helper()
	var u syscall.Rusage
	must(t, syscall.Getrusage(syscall.RUSAGE_SELF, &u))
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// TestSizes checks that four times the input takes at most nine times the processor time: a linear
// operation takes four times, a quadratic one sixteen. Times below the floor are ignored.
func TestSizes(t *testing.T) {
	const most, floor = 9, 40 * time.Millisecond
	for _, s := range slices.Concat(policyCases(), configCases()) {
		t.Run(s.name, func(t *testing.T) {
			few, many := s.prepare(t, s.n), s.prepare(t, 4*s.n)
			// The minimum of several runs is the least disturbed by other programs.
			tookFew, tookMany := processorTime(t, few), processorTime(t, many)
			for range 10 {
				if tookMany <= max(floor, most*tookFew) {
					break
				}
				tookFew, tookMany = min(tookFew, processorTime(t, few)), min(tookMany, processorTime(t, many))
			}
			t.Logf("%d: %s, %d: %s, %.1f times", s.n, tookFew, 4*s.n, tookMany, float64(tookMany)/float64(tookFew))
			if tookMany > max(floor, most*tookFew) {
				t.Errorf("%d items take %s, and %d take %s", s.n, tookFew, 4*s.n, tookMany)
			}
		})
	}
}

// processorTime returns the processor time of a function.
func processorTime(t *testing.T, do func()) time.Duration {
	t.Helper()
	runtime.GC()
	before := cpuTime(t)
	do()
	return cpuTime(t) - before
}

func reversed[T any](list []T) []T {
	list = slices.Clone(list)
	slices.Reverse(list)
	return list
}

// networkSource returns the source of the nth network.
func networkSource(nth int, s policy.SourcePolicy) policy.Source {
	if s.Chain == "" {
		s.Chain = policy.DefaultChain
	}
	return policy.Source{ID: networkID(fmt.Sprint("net", nth)), Policy: s, Order: int64(nth + 1)}
}

// desired returns the desired rules of networks with these policies.
func desired(l policy.Layout, statements ...policy.SourcePolicy) policy.Ruleset {
	var all []policy.Source
	for i, s := range statements {
		all = append(all, networkSource(i, s))
	}
	return policy.Desired(policy.Merge(all), l, policy.OwnedBy("/state"))
}

// halfExempt returns a policy with n prefixes, half of them exempt.
func halfExempt(n int) policy.SourcePolicy {
	return policy.SourcePolicy{NonMasqueradeCIDRs: prefixes(prefixesOf24(0, n/2)...), MasqueradeCIDRs: prefixes(prefixesOf24(n/2, n/2)...)}
}

func policyCases() []scalingCase {
	rules, sets := policy.Layout{}, policy.Layout{Sets: true}
	compare := func(a, b policy.Ruleset) func() { return func() { policy.Compare(a, b) } }
	return []scalingCase{
		{"merge and desired rules", 8000, func(_ *testing.T, n int) func() {
			s := halfExempt(n)
			return func() { desired(rules, s); desired(sets, s) }
		}},
		{"nested prefixes", 8000, func(_ *testing.T, n int) func() {
			var s policy.SourcePolicy
			for i := range n {
				p := prefixes(prefixesOf24(i/8, 1)...)[0]
				list := &s.NonMasqueradeCIDRs
				if i%2 == 1 {
					list = &s.MasqueradeCIDRs
				}
				next, _ := p.Addr().Prefix(24 + i%8)
				*list = append(*list, next)
			}
			return func() { desired(rules, s); desired(sets, s) }
		}},
		{"many networks of a chain", 2000, func(_ *testing.T, n int) func() {
			var all []policy.SourcePolicy
			for i := range n {
				all = append(all, policy.SourcePolicy{NonMasqueradeCIDRs: prefixes(prefixesOf24(i, 1)...)})
			}
			return func() { desired(rules, all...) }
		}},
		{"many chains", 2000, func(_ *testing.T, n int) func() {
			var all []policy.SourcePolicy
			for i := range n {
				all = append(all, policy.SourcePolicy{Chain: fmt.Sprint("C", i)})
			}
			rs := desired(rules, all...)
			return compare(rs, rs)
		}},
		{"reordered lists", 4000, func(_ *testing.T, n int) func() {
			s := halfExempt(n)
			r := policy.SourcePolicy{NonMasqueradeCIDRs: reversed(s.NonMasqueradeCIDRs), MasqueradeCIDRs: reversed(s.MasqueradeCIDRs)}
			return compare(desired(rules, s), desired(rules, r))
		}},
		{"other prefixes", 4000, func(_ *testing.T, n int) func() {
			return compare(desired(rules, halfExempt(n)), desired(rules, policy.SourcePolicy{NonMasqueradeCIDRs: prefixes(prefixesOf24(n, n)...)}))
		}},
		{"other interfaces", 1024, func(_ *testing.T, n int) func() {
			return compare(desired(rules, policy.SourcePolicy{OutputInterfaces: interfaceNames("a", n)}),
				desired(rules, policy.SourcePolicy{OutputInterfaces: interfaceNames("b", n)}))
		}},
		{"changed interfaces and sources", 512, func(_ *testing.T, n int) func() {
			of := func(prefix string, nth int) policy.Ruleset {
				return desired(sets, policy.SourcePolicy{OutputInterfaces: interfaceNames(prefix, n), SourceCIDRs: prefixes(prefixesOf24(nth, 2)...)})
			}
			return compare(of("a", 0), of("b", 2))
		}},
		{"unexpected jumps", 1024, func(_ *testing.T, n int) func() {
			a, b := desired(rules, policy.SourcePolicy{OutputInterfaces: interfaceNames("a", n)}), desired(rules, policy.SourcePolicy{OutputInterfaces: interfaceNames("b", n)})
			return func() { policy.Pair(a.Chains[0].Jumps, b.Chains[0].Jumps) }
		}},
		{"networks in conflict over a prefix", 4000, func(t *testing.T, n int) func() {
			a := networkSource(0, policy.SourcePolicy{NonMasqueradeCIDRs: prefixes(prefixesOf24(0, n)...)})
			b := networkSource(1, policy.SourcePolicy{MasqueradeCIDRs: a.Policy.NonMasqueradeCIDRs})
			return func() {
				p, disk := enforce.Proposal{Sources: []policy.Source{a}}, func() enforce.Conflists { return allNetworks{} }
				err := p.Add(b, disk, func(err error) { t.Error(err) })
				if err == nil || len(err.Error()) > 8192 {
					t.Fatalf("an error of %d bytes", len(fmt.Sprint(err)))
				}
			}
		}},
	}
}

// allNetworks is a conflist directory that has an entry for every network.
type allNetworks struct{}

func (allNetworks) HasEntry(string) bool                          { return true }
func (allNetworks) LacksEntry(string) bool                        { return false }
func (allNetworks) HasEntryWith(string, policy.SourcePolicy) bool { return false }

// entryCase parses a plugin entry with keys of a size.
func entryCase(name string, n int, keys func(n int) object) scalingCase {
	return scalingCase{name, n, func(t *testing.T, n int) func() {
		entry := keys(n)
		entry["name"], entry["type"], entry["cniVersion"] = "podnet", config.PluginType, "1.0.0"
		doc := marshalIndent(t, entry)
		return func() {
			c := config.ReadNetconf(doc)
			c.Identity()
			c.PolicyTexts()
			if _, err := c.Entry(); err != nil && len(err.Error()) > 8192 {
				t.Fatalf("an error of %d bytes", len(err.Error()))
			}
		}
	}}
}

// agentFilesCase parses agent files of a size.
func agentFilesCase(name string, n int, files func(n int) map[string]string) scalingCase {
	return scalingCase{name, n, func(t *testing.T, n int) func() {
		dir := t.TempDir()
		for name, text := range files(n) {
			must(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600))
		}
		return func() {
			_, err := agentconfig.Read(dir, config.DialectV1, config.AgentPolicy{})
			if err != nil && len(err.Error()) > 8192 {
				t.Fatalf("an error of %d bytes", len(err.Error()))
			}
		}
	}}
}

// confDirOf writes a conflist directory with n networks of a node with this dataDir.
func confDirOf(t *testing.T, n int, dataDir string) string {
	t.Helper()
	dir := t.TempDir()
	for i := range n {
		must(t, os.WriteFile(filepath.Join(dir, fmt.Sprintf("%05d.conflist", i)),
			marshalIndent(t, object{"name": fmt.Sprint("net", i), "cniVersion": "1.0.0", "plugins": []object{{"type": "bridge"}, {"type": config.PluginType, "dataDir": dataDir}}}), 0o600))
	}
	return dir
}

func configCases() []scalingCase {
	yaml := func(key string, items []string) string { return key + ":\n- " + strings.Join(items, "\n- ") + "\n" }
	const limit = "cidrLimit: 1000000\n"
	return []scalingCase{
		entryCase("an entry", 8000, func(n int) object {
			return object{"nonMasqueradeCIDRs": prefixesOf24(0, n), "masqueradeCIDRs": prefixesOf24(n, n), "cidrLimit": 1000000}
		}),
		entryCase("prefixes in both lists", 8000, func(n int) object {
			return object{"nonMasqueradeCIDRs": prefixesOf24(0, n), "masqueradeCIDRs": reversed(prefixesOf24(0, n))}
		}),
		entryCase("invalid items", 8000, func(n int) object { return object{"nonMasqueradeCIDRs": interfaceNames("x", n)} }),
		entryCase("unknown keys", 8000, func(n int) object {
			keys := object{}
			for _, name := range interfaceNames("k", n) {
				keys[name] = 1
			}
			return keys
		}),
		entryCase("interfaces", 8000, func(n int) object { return object{"outputInterfaces": interfaceNames("x", n)} }),
		entryCase("ports", 8000, func(n int) object { return object{"toPorts": singlePorts(n)} }),
		entryCase("args", 100000, func(n int) object {
			return object{"args": strings.Repeat("x", n), "prevResult": interfaceNames("x", n)}
		}),
		agentFilesCase("an agent file", 8000, func(n int) map[string]string {
			return map[string]string{"ip-masq": limit + yaml("nonMasqueradeCIDRs", prefixesOf24(0, n))}
		}),
		agentFilesCase("prefixes in lists of two files", 5000, func(n int) map[string]string {
			return map[string]string{
				"ip-masq-a": limit + yaml("nonMasqueradeCIDRs", prefixesOf24(0, n)),
				"ip-masq-b": limit + yaml("nonMasqueradeCIDRs", prefixesOf24(n, n)) + yaml("masqueradeCIDRs", prefixesOf24(0, n)),
			}
		}),
		agentFilesCase("many agent files", 250, func(n int) map[string]string {
			files := map[string]string{}
			for i := range n {
				files[fmt.Sprint("ip-masq-", i)] = yaml("nonMasqueradeCIDRs", prefixesOf24(i, 1))
			}
			return files
		}),
		agentFilesCase("keys of an agent file", 8000, func(n int) map[string]string {
			return map[string]string{"ip-masq": strings.Join(interfaceNames("k", n), ": 1\n") + ": 1\n"}
		}),
		agentFilesCase("keys of a second YAML document", 8000, func(n int) map[string]string {
			return map[string]string{"ip-masq": "masqLinkLocal: true\n---\n" + strings.Join(interfaceNames("k", n), ":\n") + ":\n"}
		}),
		agentFilesCase("brackets", 2000, func(n int) map[string]string {
			return map[string]string{"ip-masq": "nonMasqueradeCIDRs: " + strings.Repeat("[", n) + strings.Repeat("]", n)}
		}),
		{"a conf directory", 500, func(t *testing.T, n int) func() {
			dir := confDirOf(t, n, config.DefaultDataDir)
			return func() {
				c := assert.Must(config.ReadConfDir(dir))(t)
				for i := range n {
					if name := fmt.Sprint("net", i); !c.HasEntry(name) || c.LacksEntry(name) {
						t.Fatalf("lacks %s", name)
					}
				}
			}
		}},
		{"a dry run of the reconciler", 250, func(t *testing.T, n int) func() {
			s := config.DefaultSettings()
			s.DataDir = filepath.Join(t.TempDir(), "data")
			s.CNIConfDir = confDirOf(t, n, s.DataDir)
			// A network that is not stored is merged with the others, one after the other: that is quadratic, once.
			dir, err := config.ReadConfDir(s.CNIConfDir)
			must(t, errors.Join(err, dir.Err()))
			lock := assert.Must(store.Open(s.DataDir).Lock(t.Context()))(t)
			for i, list := range dir.Conflists {
				must(t, lock.Put(policy.Source{ID: networkID(list.Entries[0].Entry.Network), Order: int64(i), Policy: list.Entries[0].Entry.Policy}))
			}
			must(t, lock.Release())
			return func() {
				node := reconcile.Open(s, filepath.Join(s.CNIConfDir, "none"), nil)
				if r := node.DryRun(t.Context(), node.Read()); len(r.Pending) != 0 || len(r.State.Sources) != n {
					t.Fatalf("%d networks, %d are pending: %v", len(r.State.Sources), len(r.Pending), r.Problems)
				}
			}
		}},
		{"valid attachments of GC", 10000, func(t *testing.T, n int) func() {
			var valid []object
			for _, id := range interfaceNames("id", n) {
				valid = append(valid, object{"containerID": id, "ifname": "eth0"})
			}
			dir := filepath.Join(t.TempDir(), "data")
			conf := marshalIndent(t, object{"name": "podnet", "type": config.PluginType, "cniVersion": "1.1.0", "dataDir": dir, "cni.dev/valid-attachments": valid})
			must(t, store.Open(dir).Attach(store.Pod{Attachment: store.Attachment{Network: "podnet", ContainerID: "id0", IfName: "eth0"}}))
			return func() {
				p := cniplugin.Plugin{PluginFile: filepath.Join(dir, "none"), Stdout: io.Discard, Stderr: io.Discard, LockWait: time.Second}
				must(t, p.Funcs().GC(&skel.CmdArgs{StdinData: conf}))
			}
		}},
	}
}
