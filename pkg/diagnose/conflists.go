// SPDX-License-Identifier: Apache-2.0

package diagnose

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// list is a conflist that runtimes can load, with the configurations of its plugins.
type list struct {
	config.Conflist
	plugins []map[string]any
}

func (l list) hasEntry() bool { return len(l.Entries) > 0 }

func (e *examination) readLists() {
	for _, c := range e.ConfDir.Conflists {
		l := list{Conflist: c, plugins: make([]map[string]any, len(c.Plugins))}
		for i, text := range c.Plugins {
			e.note(json.Unmarshal(text, &l.plugins[i]))
		}
		if c.Err == nil {
			e.lists = append(e.lists, l)
		}
	}
	if !errors.Is(e.ConfDirErr, fs.ErrNotExist) {
		e.note(e.ConfDirErr)
	}
}

func mainPluginMasquerade(e *examination, f *Finding) {
	for _, l := range e.lists {
		if !l.hasEntry() {
			continue
		}
		for _, i := range l.Masquerading() {
			f.add(`%s: plugins[%d] (%s) has "ipMasq": true`, policy.Quote(l.File), i, policy.Quote(l.Types[i]))
		}
	}
}

func duplicateEntries(e *examination, f *Finding) {
	for _, network := range e.networksWithEntry() {
		for _, list := range network {
			if len(list.Entries) > 1 {
				f.add("network %s: %s", policy.Quote(list.Network), places(network))
				break
			}
		}
	}
}

// unusedEntries looks for entries in later files of a network, of which the runtime uses the first. Equal
// ones do no harm, as where another program copies the main CNI plugin's file (Istio).
func unusedEntries(e *examination, f *Finding) {
	for _, network := range e.networksWithEntry() {
		used := network[0].Entries[0]
		for _, list := range network[1:] {
			keys := used.Netconf.Differences(list.Entries[0].Netconf)
			if len(keys) > 0 {
				f.add("network %s: the entry of %s differs from that of %s in %s", policy.Quote(list.Network),
					policy.Quote(list.File), policy.Quote(network[0].File), strings.Join(keys, ", "))
			}
		}
	}
}

// networksWithEntry returns the conflists with an entry of each network, sorted by network and file.
func (e *examination) networksWithEntry() (networks [][]config.Conflist) {
	lists := map[string][]config.Conflist{}
	for _, c := range e.ConfDir.Conflists {
		if len(c.Entries) > 0 {
			lists[c.Network] = append(lists[c.Network], c)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(lists)) {
		networks = append(networks, lists[name])
	}
	return networks
}

// places returns where the entries are.
func places(lists []config.Conflist) string {
	var all []string
	for _, c := range lists {
		for _, entry := range c.Entries {
			all = append(all, fmt.Sprintf("%s plugins[%d]", policy.Quote(c.File), entry.Index))
		}
	}
	return strings.Join(all, ", ")
}

func conflistWithoutEntry(e *examination, f *Finding) {
	first := e.runtimesList()
	if e.managesConflist() || first == nil || first.hasEntry() {
		return
	}
	f.add("%s (network %s)", policy.Quote(first.File), policy.Quote(first.Network))
	if !e.UsesPlugin() {
		return
	}
	f.Severity = SeverityProblem
	if len(e.State.Sources)+len(e.State.Unreadable) == 0 {
		f.add("no policy is in force: ip-masq masquerades nothing")
	}
}

func conflistAbsent(e *examination, f *Finding) {
	unread := e.ConfDirErr != nil && !errors.Is(e.ConfDirErr, fs.ErrNotExist) // noted by readLists
	if unread || e.managesConflist() || len(e.ConfDir.Conflists) > 0 {
		return
	}
	f.add("%s has no conflist", policy.Quote(e.ConfDir.Dir))
	if e.UsesPlugin() {
		f.Severity = SeverityProblem
	}
}

func (e *examination) managesConflist() bool {
	return e.Reconciler != nil && e.Reconciler.ManagesConflist
}

// UsesPlugin reports whether the node has the plugin, an entry or its policy, and not only replaces an agent.
func (h Host) UsesPlugin() bool {
	if h.BinDir != "" && config.CheckPlugin(h.BinDir) == nil {
		return true
	}
	for _, c := range h.ConfDir.Conflists {
		if len(c.Entries) > 0 {
			return true
		}
	}
	for _, s := range h.State.Sources {
		if s.ID.Kind == policy.Network {
			return true
		}
	}
	return false
}

// runtimesList returns the first conflist by name, which is the one that the runtime uses. It passes over
// those of loopback and of Multus, which selects another, unless they have a plugin entry.
func (e *examination) runtimesList() *list {
	for i, l := range e.lists {
		isOther := l.IsMultus() || slices.Equal(l.Types, []string{"loopback"})
		if l.hasEntry() || !isOther {
			return &e.lists[i]
		}
	}
	return nil
}

// readPodNetworks collects the networks that conflists and policies state for pods, and those that ADDs
// found.
func (e *examination) readPodNetworks() {
	first := e.runtimesList()
	for i, l := range e.lists {
		isUsed := l.hasEntry() || first == &e.lists[i]
		if !isUsed {
			continue
		}
		for j, p := range l.plugins {
			if l.Types[j] != config.PluginType {
				e.addNetworks(p, false)
			}
		}
	}
	for _, p := range e.Rules.Policies() {
		for _, prefix := range slices.Concat(p.PodCIDRs.Value, p.Sources.Value, p.PodSubnets) {
			e.addPrefix(prefix)
		}
	}
	slices.SortFunc(e.pods, netip.Prefix.Compare)
}

// addNetworks looks for the keys that tell IPAM plugins the networks of pods, everywhere
// but in routes. A value of such a key is a network, a name such as usePodCidr, or a list of them.
func (e *examination) addNetworks(v any, isNetwork bool) {
	switch v := v.(type) {
	case string:
		p, err := netip.ParsePrefix(strings.TrimSpace(v))
		if err == nil && isNetwork {
			e.addPrefix(p.Masked())
		}
	case map[string]any:
		networks := []string{"subnet", "podcidr", "range", "ipv4_pools", "ipv6_pools"}
		for key, item := range v {
			key = strings.ToLower(key)
			if key != "routes" && key != "args" {
				e.addNetworks(item, slices.Contains(networks, key))
			}
		}
	case []any:
		for _, item := range v {
			e.addNetworks(item, isNetwork)
		}
	}
}

// addPrefix adds a network, unless a known one covers it, in place of those that it covers. It leaves out
// 0.0.0.0/0 and ::/0, which stand for any source.
func (e *examination) addPrefix(network netip.Prefix) {
	if network.Bits() == 0 {
		return
	}
	var rest []netip.Prefix
	for _, known := range e.pods {
		if covers(known, network) {
			return
		}
		if !covers(network, known) {
			rest = append(rest, known)
		}
	}
	rest = append(rest, network)
	e.pods = rest
}

func covers(outer, inner netip.Prefix) bool {
	return outer.Bits() <= inner.Bits() && outer.Contains(inner.Addr())
}

// networksWithoutHook looks for networks on whose pods ip-masq has no effect.
func networksWithoutHook(e *examination, f *Finding) {
	for _, l := range e.lists {
		if plugin := l.NoHookPlugin(); l.hasEntry() && plugin != "" {
			f.add("network %s (%s): %s", policy.Quote(l.Network), policy.Quote(l.File), plugin)
		}
	}
}

// hasNoHook reports whether packets of a network's pods usually pass no hook of the node.
func (e *examination) hasNoHook(network string) bool {
	list := e.ConfDir.WithEntry(network)
	return list != nil && list.NoHookPlugin() != ""
}

// NoHookPlugin returns the main plugin behind which packets of a source usually pass no hook of the node, or
// "": that of the pod that holds the source. If no pod on record does, all networks with a plugin entry must
// have such a plugin.
func NoHookPlugin(source netip.Addr, pods []store.Pod, confs config.ConfDir) string {
	holder, isHeld := latestHolder(source, pods)
	if isHeld {
		list := confs.WithEntry(holder.Network)
		if list == nil {
			return ""
		}
		return list.NoHookPlugin()
	}
	found := ""
	for _, l := range confs.Conflists {
		if len(l.Entries) == 0 {
			continue
		}
		found = l.NoHookPlugin()
		if found == "" {
			return ""
		}
	}
	return found
}
