// SPDX-License-Identifier: Apache-2.0

package diagnose

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"slices"
	"strings"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/safefile"
)

// podNetwork is where pods have their addresses, as far as is shown here.
type podNetwork struct {
	prefix netip.Prefix
	where  string // that shows it
}

// readPodNetworks collects the networks that conflists name for the pods of our
// networks, and those in which attached containers have addresses.
func (e *examination) readPodNetworks() error {
	first := e.runtimesList()
	for i, l := range e.lists {
		if l.ours() || first == &e.lists[i] {
			for _, p := range l.plugins {
				if p.kind() != config.PluginType {
					e.addNetworks(p, policy.Quote(l.File))
				}
			}
		}
	}
	text, err := readFile(e.path("run/flannel/subnet.env"))
	for line := range strings.Lines(string(text)) {
		for _, key := range []string{"FLANNEL_NETWORK=", "FLANNEL_IPV6_NETWORK="} {
			if value, found := strings.CutPrefix(strings.TrimSpace(line), key); found {
				for network := range strings.SplitSeq(value, ",") {
					e.addPrefix(network, "/run/flannel/subnet.env")
				}
			}
		}
	}
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	err = errors.Join(err, e.readResults())
	slices.SortFunc(e.pods, func(p, q podNetwork) int { return p.prefix.Compare(q.prefix) })
	return err
}

// addNetworks looks for the keys by which IPAM plugins are told the networks of
// pods, wherever they stand but in routes.
func (e *examination) addNetworks(v any, where string) {
	switch v := v.(type) {
	case plugin:
		e.addNetworks(map[string]any(v), where)
	case map[string]any:
		for key, item := range v {
			switch key {
			case "subnet", "podcidr", "range", "ipv4_pools", "ipv6_pools":
				for _, s := range stringsIn(item) {
					e.addPrefix(s, where)
				}
			case "routes", "args":
			default:
				e.addNetworks(item, where)
			}
		}
	case []any:
		for _, item := range v {
			e.addNetworks(item, where)
		}
	}
}

func stringsIn(v any) []string {
	switch v := v.(type) {
	case string:
		return []string{v}
	case []any:
		var all []string
		for _, item := range v {
			all = append(all, stringsIn(item)...)
		}
		return all
	}
	return nil
}

// addPrefix adds a network, unless one that is known covers it.
func (e *examination) addPrefix(text, where string) {
	p, err := netip.ParsePrefix(strings.TrimSpace(text))
	if err != nil {
		return // a name, such as usePodCidr
	}
	p = p.Masked()
	covers := func(outer, inner netip.Prefix) bool {
		return outer.Bits() <= inner.Bits() && outer.Contains(inner.Addr())
	}
	if slices.ContainsFunc(e.pods, func(known podNetwork) bool { return covers(known.prefix, p) }) {
		return
	}
	e.pods = slices.DeleteFunc(e.pods, func(known podNetwork) bool { return covers(p, known.prefix) })
	e.pods = append(e.pods, podNetwork{p, where})
}

// mostResults is how many attachments are looked at.
const mostResults = 2000

// readResults reads what runtimes cache of the attachments to our networks
// (libcni): the results, with the addresses of containers.
func (e *examination) readResults() error {
	dir := e.path("var/lib/cni/results")
	files, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	var errs []error
	for _, file := range files[:min(len(files), mostResults)] {
		data, err := readFile(e.path("var/lib/cni/results", file.Name()))
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, safefile.ErrIrregular) {
			continue
		}
		var cached struct {
			NetworkName string
			Result      struct{ IPs []struct{ Address string } }
		}
		if err == nil {
			err = json.Unmarshal(data, &cached)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("read the cached result %s: %w", policy.Quote(file.Name()), err))
			continue
		}
		if e.known(cached.NetworkName) {
			for _, ip := range cached.Result.IPs {
				e.addPrefix(ip.Address, "an attachment to "+policy.Quote(cached.NetworkName))
			}
		}
	}
	return errors.Join(errs...)
}

// known reports whether a network is one of ours, on disk or in the documents.
func (e *examination) known(network string) bool {
	return e.ConfDir.HasEntry(network) || e.State.Find(policy.SourceID{Kind: policy.Network, Name: network}) != nil
}

// podNetworksNotExempt looks for policies that masquerade what pods send to each
// other. Such packets pass POSTROUTING where they are routed, and on one bridge
// too where br_netfilter says so.
func podNetworksNotExempt(e *examination) ([]Finding, error) {
	f := Finding{ID: "pod-network-not-exempt", Severity: SeverityProblem,
		Summary: "The policy masquerades what pods send to pods: they see the node's address, and network policies fail.",
		Remedy:  "Add the pod network to nonMasqueradeCIDRs."}
	for _, pods := range e.pods {
		family := policy.FamilyOf(pods.prefix.Addr())
		for _, p := range e.policies() {
			from, managed := scope(p, family)
			here := policy.RangesOf(pods.prefix)
			if sources := here.Intersect(from); !managed || len(sources.Without(exemptSources(p, family))) == 0 {
				continue
			}
			if rest := here.Without(exemptAddresses(p, family)); len(rest) > 0 && len(p.Interfaces.Value) == 0 {
				part := ""
				if !rest.Equal(here) {
					part = rest.String() + " of "
				}
				f.Detail = append(f.Detail, fmt.Sprintf("%s masquerades %spod network %s (%s)", p.Chain, part, pods.prefix, pods.where))
			}
		}
	}
	if value, err := readFile(e.path("proc/sys/net/bridge/bridge-nf-call-iptables")); err == nil && string(bytes.TrimSpace(value)) == "1" && len(f.Detail) > 0 {
		f.Detail = append(f.Detail, "net.bridge.bridge-nf-call-iptables is 1: this is so between pods of one bridge, too")
	}
	return []Finding{f}, nil
}

func exemptSources(p policy.Policy, f policy.Family) policy.Ranges {
	var prefixes []netip.Prefix
	for _, e := range p.ExemptSources {
		if policy.FamilyOf(e.Prefix.Addr()) == f {
			prefixes = append(prefixes, e.Prefix)
		}
	}
	return policy.RangesOf(prefixes...)
}
