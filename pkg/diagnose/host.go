// SPDX-License-Identifier: Apache-2.0

package diagnose

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

func missingCapabilities(e *examination) ([]Finding, error) {
	const capNetAdmin, capNetRaw = 12, 13 // linux/capability.h
	f := Finding{ID: "missing-capability", Severity: SeverityProblem,
		Summary: "This process may not do what keeping the rules takes.",
		Remedy:  "Run as root, or give the capability: securityContext.capabilities.add in a DaemonSet, AmbientCapabilities in a systemd unit."}
	status, err := readFile(e.path("proc/self/status"))
	if err != nil {
		return nil, err
	}
	_, line, found := strings.Cut("\n"+string(status), "\nCapEff:")
	line, _, _ = strings.Cut(line, "\n")
	effective, err := strconv.ParseUint(strings.TrimSpace(line), 16, 64)
	if !found || err != nil {
		return nil, errors.New("find the capabilities of this process: /proc/self/status has no CapEff that can be read")
	}
	if effective&(1<<capNetAdmin) == 0 {
		f.Detail = append(f.Detail, "CAP_NET_ADMIN: nothing of netfilter can be read or written without it")
	}
	legacy := slices.ContainsFunc(e.choices(), func(c netfilter.Choice) bool { return c.Variant == netfilter.VariantLegacy })
	if legacy && effective&(1<<capNetRaw) == 0 {
		f.Detail = append(f.Detail, "CAP_NET_RAW: iptables-legacy opens a raw socket")
	}
	return []Finding{f}, nil
}

func forwardingOff(e *examination) ([]Finding, error) {
	f := Finding{ID: "forwarding-off", Severity: SeverityProblem,
		Summary: "The kernel does not forward: nothing of pods gets out, masqueraded or not.",
		Remedy:  "Set the sysctl to 1, in /etc/sysctl.d to make it last."}
	sysctls := []string{"net/ipv4/ip_forward"}
	if e.managesIPv6() {
		sysctls = append(sysctls, "net/ipv6/conf/all/forwarding")
	}
	var errs []error
	for _, name := range sysctls {
		value, err := readFile(e.path("proc/sys", name))
		if err != nil && !errors.Is(err, fs.ErrNotExist) { // a kernel without the family
			errs = append(errs, err)
		}
		if strings.TrimSpace(string(value)) == "0" {
			f.Detail = append(f.Detail, strings.ReplaceAll(name, "/", ".")+" is 0")
		}
	}
	return []Finding{f}, errors.Join(errs...)
}

// mixedVariants looks for rules in both variants of iptables: each of them sees
// its own alone, while packets meet both.
func mixedVariants(e *examination) ([]Finding, error) {
	f := Finding{ID: "mixed-iptables", Severity: SeverityNotice,
		Summary: "Both variants of iptables are in use: no program shows the rules of both, and packets meet both.",
		Remedy:  "Use one variant on the node (update-alternatives --set iptables ...), and reboot to be rid of the other's rules."}
	usages, err := e.Variants(e.ctx)
	if err != nil {
		err = fmt.Errorf("find out which variants of iptables are in use: %w", err)
	}
	used := 0
	for _, u := range usages {
		if u.NATRules > 0 {
			used++
		}
	}
	for _, u := range usages {
		if used > 1 {
			f.Detail = append(f.Detail, fmt.Sprintf("iptables-%s has rules in table nat", u.Variant))
		}
	}
	for _, c := range e.choices() {
		if c.Backend != policy.IPTables {
			continue
		}
		same := func(u string) bool { return u == c.Variant }
		var kubelets []string
		for _, u := range usages {
			if u.Kubelet {
				kubelets = append(kubelets, u.Variant)
			}
		}
		if len(kubelets) > 0 && !slices.ContainsFunc(kubelets, same) {
			f.Severity = SeverityProblem
			f.Detail = append(f.Detail, fmt.Sprintf("kubelet uses iptables-%s, and our chains are kept in iptables-%s", kubelets[0], c.Variant))
		}
	}
	return []Finding{f}, err
}

// unit is a service that loads saved rulesets at boot, over what is there.
type unit struct {
	name  string
	files []string
}

func units() []unit {
	return []unit{
		{"netfilter-persistent.service", []string{"etc/iptables/rules.v4", "etc/iptables/rules.v6"}},
		{"iptables.service", []string{"etc/sysconfig/iptables", "etc/iptables/iptables.rules"}},
		{"ip6tables.service", []string{"etc/sysconfig/ip6tables", "etc/iptables/ip6tables.rules"}},
		{"nftables.service", []string{"etc/nftables.conf", "etc/sysconfig/nftables.conf"}},
	}
}

func savedRulesets(e *examination) ([]Finding, error) {
	f := Finding{ID: "saved-ruleset", Severity: SeverityNotice,
		Summary: "A saved ruleset touches our rules when it is loaded, at boot or when its service restarts.",
		Remedy:  "Take our chains and tables out of the file, and have it flush only what is its own (not table nat, nor the ruleset)."}
	var errs []error
	for _, u := range units() {
		enabled, err := e.enabled(u.name)
		errs = append(errs, err)
		for _, file := range u.files {
			text, err := readFile(e.path(file))
			if err != nil {
				if !errors.Is(err, fs.ErrNotExist) {
					errs = append(errs, err)
				}
				continue
			}
			for _, why := range e.harms(string(text), enabled) {
				f.Detail = append(f.Detail, fmt.Sprintf("/%s (%s, %s): %s", file, u.name, map[bool]string{true: "enabled", false: "not enabled"}[enabled], why))
			}
		}
	}
	return []Finding{f}, errors.Join(errs...)
}

// enabled reports whether systemd starts the service.
func (e *examination) enabled(service string) (bool, error) {
	for _, dir := range []string{"etc/systemd/system", "usr/lib/systemd/system", "lib/systemd/system"} {
		found, err := filepath.Glob(e.path(dir, "*.wants", service))
		if len(found) > 0 || err != nil {
			return true, err
		}
	}
	return false, nil
}

// harms tells what a saved ruleset does to ours. What it would flush is of
// interest only if somebody loads it.
func (e *examination) harms(text string, enabled bool) []string {
	var why []string
	words := map[string]bool{}
	for line := range strings.Lines(text) {
		line, _, _ = strings.Cut(line, "#")
		fields := strings.Fields(line)
		for i, word := range fields {
			words[strings.TrimPrefix(word, ":")] = true
			if i > 0 && fields[i-1] == "flush" {
				words["flush "+strings.TrimSuffix(word, ";")] = true
			}
		}
	}
	for _, chain := range e.chainNames() {
		if words[chain] || words["masq-"+chain] {
			why = append(why, "holds chain "+chain)
		}
	}
	if enabled && words["flush ruleset"] {
		why = append(why, "flushes the ruleset, ours with it")
	}
	iptables := slices.ContainsFunc(e.choices(), func(c netfilter.Choice) bool { return c.Backend == policy.IPTables })
	if enabled && words["*nat"] && iptables {
		why = append(why, "replaces table nat, our chains with it")
	}
	return why
}

// chainNames returns the names of our chains, or that of the agents' where there
// is none.
func (e *examination) chainNames() []string {
	var names []string
	for _, p := range e.policies() {
		names = append(names, p.Chain)
	}
	for _, o := range e.State.Record.Chains {
		names = append(names, o.Chain)
	}
	if len(names) == 0 {
		names = []string{policy.DefaultChain}
	}
	slices.Sort(names)
	return slices.Compact(names)
}
