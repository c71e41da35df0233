// SPDX-License-Identifier: Apache-2.0

package diagnose

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/thirdparty"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// foreignRules looks for rules of others that masquerade what is exempt: our
// RETURN ends our chain alone, and does not keep them from it.
func foreignRules(e *examination) ([]Finding, error) {
	rules, err := e.ThirdParty(e.ctx)
	sure := Finding{ID: "foreign-masquerade", Severity: SeverityProblem,
		Summary: "Rules of others masquerade destinations that the policy leaves alone."}
	kubelet := Finding{ID: "kubelet-masquerade", Severity: SeverityProblem,
		Summary: "Rules of kubelet, kubenet or kube-proxy masquerade destinations that the policy leaves alone."}
	maybe := Finding{ID: "foreign-masquerade-possible", Severity: SeverityNotice,
		Summary: "Rules of others may masquerade destinations that the policy leaves alone."}
	parties := map[*Finding][]string{}
	for _, c := range Caught(e.policies(), rules) {
		line, doubt := c.String(), e.doubt(c)
		f := &sure
		switch {
		case doubt != "":
			f, line = &maybe, line+" ("+doubt+")"
		case kubelets(c.Rule):
			f = &kubelet
		}
		f.Detail = append(f.Detail, line)
		if remedy := remedyFor(c.Rule); remedy != "" && !slices.Contains(parties[f], remedy) {
			parties[f] = append(parties[f], remedy)
		}
	}
	general := "Switch masquerading off where the rules come from, or remove them; what ip-masq leaves alone they masquerade all the same, before it or after it."
	sure.Remedy = strings.Join(append(parties[&sure], general), " ")
	maybe.Remedy = strings.Join(append(parties[&maybe], "Look at the rules; name sourceCIDRs where they are about other traffic than that of pods."), " ")
	kubelet.Remedy = strings.Join(append(parties[&kubelet], general), " ")
	if err != nil {
		err = fmt.Errorf("read the NAT rules of others: %w", err)
	}
	return []Finding{sure, kubelet, maybe}, err
}

// doubt tells why the rule may do no harm after all; "" if it surely does.
func (e *examination) doubt(c Catch) string {
	r := c.Rule
	switch {
	case !r.Exact:
		return "not all of the rule could be read"
	case r.Match.From == nil || c.Scoped:
		return ""
	}
	known := false
	for _, p := range e.pods {
		if policy.FamilyOf(p.prefix.Addr()) == r.Family {
			known = true
			if meet(policy.RangesOf(p.prefix), r.Match.From) {
				return ""
			}
		}
	}
	if known {
		return "its sources are no pod network that is known here"
	}
	return "whether its sources are pods is not known here"
}

// String writes the rule, what it catches, and whether it comes before us.
func (c Catch) String() string {
	const most = 4
	var what []string
	for _, e := range c.Destinations {
		what = append(what, e.Prefix.String())
	}
	for _, e := range c.Sources {
		what = append(what, "all from "+e.Prefix.String())
	}
	if rest := len(what) - most; rest > 0 {
		what = append(what[:most], fmt.Sprintf("%d more", rest))
	}
	order := map[thirdparty.Order]string{thirdparty.Before: ", before our chain", thirdparty.After: ", after our chain"}[c.Rule.Order]
	return fmt.Sprintf("%s: catches %s, which %s leaves alone%s", c.Rule.Text, strings.Join(what, ", "), c.Chain, order)
}

// kubelets reports whether the rule is kubelet's, kubenet's or kube-proxy's.
func kubelets(r thirdparty.Rule) bool {
	return strings.HasPrefix(r.Chain, "KUBE-") || strings.HasPrefix(r.Comment, "kubenet:") || r.Table == "kube-proxy"
}

// remedyFor tells what to do about the rules of parties that are well known.
func remedyFor(r thirdparty.Rule) string {
	switch {
	case strings.HasPrefix(r.Comment, "kubenet:"):
		return "kubelet's kubenet: give --non-masquerade-cidr=0.0.0.0/0, then delete the rule or reboot."
	case kubelets(r):
		return "kube-proxy: leave --masquerade-all (iptables.masqueradeAll) off."
	case strings.HasPrefix(r.Chain, "FLANNEL") || strings.HasPrefix(r.Table, "flannel"):
		return "flannel: run flanneld without --ip-masq."
	case r.Table == "kindnet-ipmasq":
		return "kindnet: run kindnetd with --masquerading=false."
	case r.Chain == "KIND-MASQ-AGENT":
		return "kind's kindnetd has no switch: create the cluster with networking.disableDefaultCNI: true and another main plugin."
	case strings.HasPrefix(r.Chain, "cali-"):
		return "Calico: set natOutgoing: false in the IPPool."
	case strings.HasPrefix(r.Chain, "CILIUM_"):
		return "Cilium: set enable-ipv4-masquerade and enable-ipv6-masquerade to false."
	case strings.HasPrefix(r.Chain, "AWS-SNAT"):
		return "Amazon VPC CNI: set AWS_VPC_K8S_CNI_EXTERNALSNAT=true."
	case strings.HasPrefix(r.Chain, "CNI-") || strings.HasPrefix(r.Table, "cni_plugins"):
		return "A CNI plugin's ipMasq: drain the node, set it to false in the conflist, and let the pods come back: rules of pods that run would stay."
	case slices.Contains(r.Match.NotOut, "docker0"):
		return "Docker: run dockerd with --ip-masq=false if it must not."
	}
	return ""
}

// leftoverChains looks for chains of ours in another backend or variant than the
// one that is in force: there they masquerade too.
func leftoverChains(e *examination) ([]Finding, error) {
	f := Finding{ID: "leftover-chain", Severity: SeverityProblem,
		Summary: "A chain stands in more than one backend, and the copy that is not in force masquerades too.",
		Remedy: "Stop whoever writes it; then ip-masq-reconciler once removes it, unless it holds other rules than RETURN and MASQUERADE: " +
			"those go with iptables -t nat -F, -D POSTROUTING and -X."}
	for _, o := range e.State.Record.Chains {
		if o.Stuck {
			f.Detail = append(f.Detail, fmt.Sprintf("%s in %s (%s): it could not be removed", o.Chain, o.Backend, o.Family))
		}
	}
	if e.Rules == nil || len(e.Drivers) == 0 {
		return []Finding{f}, nil
	}
	var errs []error
	for _, g := range e.Rules.Groups {
		seen := map[string]bool{}
		for _, c := range g.Desired.Chains {
			if seen[c.Name] {
				continue
			}
			seen[c.Name] = true
			others, err := e.Drivers.Duplicates(e.ctx, c.Name, g.Choice)
			for _, o := range others {
				f.Detail = append(f.Detail, fmt.Sprintf("%s is kept in %s and stands in %s", c.Name, g.Choice, o))
			}
			errs = append(errs, err)
		}
	}
	return []Finding{f}, errors.Join(errs...)
}

// chainsOfOtherDataDirs looks for chains of another dataDir, in every form and under every
// name.
func chainsOfOtherDataDirs(e *examination) ([]Finding, error) {
	f := Finding{ID: "other-data-dir", Severity: SeverityProblem,
		Summary: "Chains of another dataDir stand on this node: they masquerade what the policy exempts.",
		Remedy: "Use one dataDir in all plugin entries and in reconciler.toml, and state it as data_dir in /etc/ip-masq/plugin.toml: " +
			"the next ADD, or ip-masq-reconciler once, removes the chains of the other."}
	owned, err := e.Drivers.Owned(e.ctx)
	for _, c := range owned {
		if e.DataDir != "" && c.Owner.Differs(policy.OwnedBy(e.DataDir)) {
			f.Detail = append(f.Detail, fmt.Sprintf("chain %s (%s) in %s belongs to %s and not to %s",
				c.Name, c.Family, c.Choice, policy.Quote(c.Owner.DataDir), policy.Quote(e.DataDir)))
		}
	}
	return []Finding{f}, err
}
