// SPDX-License-Identifier: Apache-2.0

package diagnose

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// podNetworksNotExempt looks for policies that masquerade traffic between pods.
func podNetworksNotExempt(e *examination, f *Finding) {
	for _, p := range e.Rules.Policies() {
		if len(p.Interfaces.Value) > 0 { // which may be none that leads to pods
			continue
		}
		for _, pods := range e.pods {
			addNetworkNotExempt(f, &p, pods)
		}
		for _, network := range networksOf(e.Pods) {
			if !e.hasNoHook(network) {
				e.addPodsNotExempt(f, &p, network)
			}
		}
	}
}

func addNetworkNotExempt(f *Finding, p *policy.Policy, pods netip.Prefix) {
	family := policy.FamilyOf(pods.Addr())
	all := policy.RangesOf(pods)
	sources := all.Intersect(p.Scope(family).Sources).Without(p.SourcesExempt(family))
	masqueraded := all.Without(p.DestinationsExempt(family))
	if len(sources) > 0 && len(masqueraded) > 0 {
		f.add("%s masquerades %s of pod network %s", p.Chain, masqueraded, pods)
	}
}

// addPodsNotExempt adds the pods of a network that another pod of it reaches with the node's address. Their
// records tell it where a main plugin gives /32 addresses, as Calico does, and so no subnet shows the
// network.
func (e *examination) addPodsNotExempt(f *Finding, p *policy.Policy, network string) {
	pods := podsOfNetwork(e.Pods, network)
	for _, family := range p.Families() {
		sources := p.Scope(family).Sources.Without(p.SourcesExempt(family))
		exempt := p.DestinationsExempt(family)
		var masqueraded []string
		for i, to := range pods {
			others := slices.Concat(pods[:i], pods[i+1:])
			if !hasAddressIn(others, family, sources) {
				continue
			}
			for _, a := range addressesOf([]store.Pod{to}, family) {
				if !exempt.Contains(a) && !e.isInPodNetwork(a) {
					masqueraded = append(masqueraded, a.String())
				}
			}
		}
		if len(masqueraded) > 0 {
			f.add("%s masquerades traffic between pods of network %s: to %s",
				p.Chain, policy.Quote(network), strings.Join(policy.First(4, masqueraded), ", "))
		}
	}
}

// hasAddressIn reports whether a pod has an address of the family in a set.
func hasAddressIn(pods []store.Pod, family policy.Family, set policy.Ranges) bool {
	for _, a := range addressesOf(pods, family) {
		if set.Contains(a) {
			return true
		}
	}
	return false
}

// isInPodNetwork reports whether an address is in a pod network that is known without records.
func (e *examination) isInPodNetwork(a netip.Addr) bool {
	for _, pods := range e.pods {
		if pods.Contains(a) {
			return true
		}
	}
	return false
}

// scopesWithoutMatch looks for keys that match no interface or no pod of the node.
func scopesWithoutMatch(e *examination, f *Finding) {
	interfaces := e.interfaces()
	for _, p := range e.Rules.Policies() {
		stated := p.Interfaces.Value
		if len(stated) > 0 && len(interfaces) > 0 && !namesAny(stated, interfaces) {
			f.add("%s: %s names %s, and the node has %s", p.Chain, p.Interfaces.Origins[0],
				strings.Join(policy.First(4, stated), ", "), strings.Join(policy.First(8, interfaces), ", "))
		}
		pods := e.podsOf(&p)
		addPrefixesWithoutPod(f, &p, p.Sources, pods)
		addPrefixesWithoutPod(f, &p, p.PodCIDRs, pods)
	}
}

// interfaces returns the names of the node's interfaces, without lo.
func (e *examination) interfaces() (names []string) {
	for line := range strings.Lines(e.read("proc/net/dev")) {
		name, _, hasCounters := strings.Cut(strings.TrimSpace(line), ":")
		if hasCounters && name != "lo" {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// namesAny reports whether one of the interfaces has a name that is stated.
func namesAny(stated, interfaces []string) bool {
	for _, pattern := range stated {
		for _, name := range interfaces {
			if policy.InterfaceWithin(name, pattern) {
				return true
			}
		}
	}
	return false
}

// addPrefixesWithoutPod adds the prefixes of each family of a key, unless they hold a pod or no pod of that
// family is known; and the whole key if all pods are of another family, which it leaves out of scope.
func addPrefixesWithoutPod(f *Finding, p *policy.Policy, key policy.WithOrigins[[]netip.Prefix], pods []store.Pod) {
	hasFamilyOfPods := false
	for _, family := range policy.Families() {
		var prefixes []netip.Prefix
		for _, prefix := range key.Value {
			if policy.FamilyOf(prefix.Addr()) == family {
				prefixes = append(prefixes, prefix)
			}
		}
		addresses := addressesOf(pods, family)
		if len(prefixes) == 0 || len(addresses) == 0 {
			continue
		}
		hasFamilyOfPods = true
		if !hasAddressIn(pods, family, policy.RangesOf(prefixes...)) {
			addWithoutPod(f, p, key.Origins[0], prefixes, addresses)
		}
	}
	if len(key.Value) == 0 || hasFamilyOfPods {
		return
	}
	for _, family := range p.Families() {
		if addresses := addressesOf(pods, family); len(addresses) > 0 {
			addWithoutPod(f, p, key.Origins[0], key.Value, addresses)
		}
	}
}

func addWithoutPod(
	f *Finding, p *policy.Policy, key policy.Origin, prefixes []netip.Prefix, pods []netip.Addr,
) {
	const most = 4
	f.add("%s: %s has %s, and pods have %s", p.Chain, key,
		strings.Join(policy.First(most, texts(prefixes)), ", "), strings.Join(policy.First(most, texts(pods)), ", "))
}

func texts[T fmt.Stringer](values []T) (texts []string) {
	for _, v := range values {
		texts = append(texts, v.String())
	}
	return texts
}

// podsOf returns the pods on record of the networks that state a policy, or all pods if none of them is a
// network.
func (e *examination) podsOf(p *policy.Policy) (pods []store.Pod) {
	ofNetworks := false
	for _, s := range e.State.Sources {
		if s.ID.Kind == policy.Network && s.Policy.Chain == p.Chain {
			ofNetworks = true
			pods = append(pods, podsOfNetwork(e.Pods, s.ID.Name)...)
		}
	}
	if !ofNetworks {
		return e.Pods
	}
	return pods
}

func podsOfNetwork(all []store.Pod, network string) (pods []store.Pod) {
	for _, p := range all {
		if p.Network == network {
			pods = append(pods, p)
		}
	}
	return pods
}

// networksOf returns the networks of pods, sorted.
func networksOf(pods []store.Pod) (networks []string) {
	for _, p := range pods {
		networks = append(networks, p.Network)
	}
	slices.Sort(networks)
	return slices.Compact(networks)
}

// addressesOf returns the addresses of one family that pods have, sorted.
func addressesOf(pods []store.Pod, family policy.Family) (addresses []netip.Addr) {
	for _, p := range pods {
		for _, a := range p.Addresses {
			if policy.FamilyOf(a) == family {
				addresses = append(addresses, a)
			}
		}
	}
	slices.SortFunc(addresses, netip.Addr.Compare)
	return slices.Compact(addresses)
}
