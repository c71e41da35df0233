// SPDX-License-Identifier: Apache-2.0

package diagnose

import (
	"errors"
	"io/fs"
	"maps"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/thirdparty"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/safefile"
)

// agentRunning looks for processes of agents, as far as this one sees them. Only those of root count: other
// users can give theirs any name, and cannot change rules.
func agentRunning(e *examination, f *Finding) {
	for _, entry := range e.readDir("proc") {
		if !isProcessOfRoot(entry) {
			continue
		}
		cmdline, _, err := safefile.ReadFile(filepath.Join(e.Root, "proc", entry.Name(), "cmdline"), maxFile)
		hasEnded := errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ESRCH)
		if hasEnded {
			continue
		}
		if err != nil {
			e.noteAs("list the processes", err)
			return
		}
		args := strings.Split(strings.TrimRight(string(cmdline), "\x00"), "\x00")
		if strings.HasPrefix(path.Base(args[0]), "ip-masq-agent") {
			f.add("process %s (%s)", entry.Name(), policy.Quote(strings.Join(args, " ")))
		}
	}
}

// isProcessOfRoot reports whether an entry of /proc is a process of root or of the user of this one. The
// directory of a process belongs to its user. The files in it belong to root if the process is not dumpable
// (proc(5)).
func isProcessOfRoot(entry fs.DirEntry) bool {
	_, err := strconv.Atoi(entry.Name())
	if err != nil {
		return false
	}
	info, err := entry.Info()
	if err != nil {
		return false
	}
	uid, _ := safefile.Owner(info)
	return uid == 0 || safefile.IsOwn(info)
}

func ebpfMasquerade(e *examination, f *Finding) {
	for line := range strings.Lines(e.read("proc/net/dev")) {
		name, _, _ := strings.Cut(strings.TrimSpace(line), ":")
		switch name {
		case "cilium_host":
			f.add("interface cilium_host: Cilium")
		case "bpfin.cali", "bpfout.cali":
			f.Severity = SeverityProblem
			f.add("interface %s: Calico's eBPF data plane", name)
		}
	}
}

func missingCapabilities(e *examination, f *Finding) {
	const capNetAdmin, capNetRaw = 12, 13 // linux/capability.h
	_, line, _ := strings.Cut("\n"+e.read("proc/self/status"), "\nCapEff:")
	line, _, _ = strings.Cut(line, "\n")
	effective, err := strconv.ParseUint(strings.TrimSpace(line), 16, 64)
	if err != nil {
		e.note(errors.New("find the capabilities of this process: " +
			"/proc/self/status has no CapEff that can be read"))
		return
	}
	if effective&(1<<capNetAdmin) == 0 {
		f.add("CAP_NET_ADMIN: to read or write netfilter")
	}
	if e.hasChoice(policy.IPTables, netfilter.VariantLegacy) && effective&(1<<capNetRaw) == 0 {
		f.add("CAP_NET_RAW: iptables-legacy opens a raw socket")
	}
}

func forwardingOff(e *examination, f *Finding) {
	sysctls := []string{"net/ipv4/ip_forward"}
	for _, p := range e.Rules.Policies() {
		if p.EnableIPv6.Value {
			sysctls = append(sysctls, "net/ipv6/conf/all/forwarding")
			break
		}
	}
	for _, name := range sysctls { // without the family in the kernel there is no file
		if strings.TrimSpace(e.read("proc/sys/"+name)) == "0" {
			f.add("%s is 0", strings.ReplaceAll(name, "/", "."))
		}
	}
}

// mixedVariants finds rules in both variants of iptables, unless all rules of iptables-legacy are those of
// ip-masq. Then the host's iptables is legacy, and the rules of iptables-nft are of a program that brings its
// own iptables.
func mixedVariants(e *examination, f *Finding) {
	rules, err := thirdparty.Variants(e.ownsChain)
	e.noteAs("find which variants of iptables are in use", err)
	if len(rules) < 2 {
		return
	}
	for _, variant := range slices.Sorted(maps.Keys(rules)) {
		version := e.IPTablesVersion(variant)
		f.add("iptables-%s (%s) has %d rules in table nat", variant, version, rules[variant])
	}
}

// ownsChain reports whether a chain is on record there, or is desired there.
func (e *examination) ownsChain(c netfilter.Choice, chain string) bool {
	for _, o := range e.State.Record.Chains {
		if o.Chain == chain && enforce.ChoiceOf(o) == c {
			return true
		}
	}
	for _, d := range e.Rules.Chains {
		if d.Policy.Chain == chain && d.Choice == c {
			return true
		}
	}
	return false
}

func savedRulesets(e *examination, f *Finding) {
	for _, service := range []struct {
		name  string
		files []string
	}{
		{"netfilter-persistent.service", []string{"etc/iptables/rules.v4", "etc/iptables/rules.v6"}},
		{"iptables.service", []string{"etc/sysconfig/iptables", "etc/iptables/iptables.rules"}},
		{"ip6tables.service", []string{"etc/sysconfig/ip6tables", "etc/iptables/ip6tables.rules"}},
		{"nftables.service", []string{"etc/nftables.conf", "etc/sysconfig/nftables.conf"}},
	} {
		isEnabled := e.isEnabled(service.name)
		state := "not enabled"
		if isEnabled {
			state = "enabled"
		}
		for _, file := range service.files {
			for _, change := range e.changesBy(e.read(file), isEnabled) {
				f.add("/%s (%s, %s): %s", file, service.name, state, change)
			}
		}
	}
}

// isEnabled reports whether systemd starts a service at boot.
func (e *examination) isEnabled(service string) bool {
	for _, dir := range []string{"etc/systemd/system", "usr/lib/systemd/system", "lib/systemd/system"} {
		wanted, err := filepath.Glob(filepath.Join(e.Root, dir, "*.wants", service))
		e.note(err)
		if len(wanted) > 0 {
			return true
		}
	}
	return false
}

// changesBy returns what a saved ruleset does to the owned rules. Flushing counts only if it is loaded.
func (e *examination) changesBy(text string, isEnabled bool) []string {
	var changes []string
	chains := []string{policy.DefaultChain}
	for _, p := range e.Rules.Policies() {
		chains = append(chains, p.Chain)
	}
	slices.Sort(chains)
	for _, chain := range slices.Compact(chains) {
		if hasWords(text, "(masq-|guard-)?"+regexp.QuoteMeta(chain)) {
			changes = append(changes, "contains chain "+chain)
		}
	}
	if !isEnabled {
		return changes
	}
	if hasWords(text, `flush\s+ruleset`) {
		changes = append(changes, "flushes the ruleset, with the rules of ip-masq")
	}
	if hasWords(text, `\*nat`) && e.hasChoice(policy.IPTables, "") {
		changes = append(changes, "replaces table nat, with the chains of ip-masq")
	}
	return changes
}

// hasWords reports whether a ruleset has words that match a pattern, outside comments.
func hasWords(ruleset, pattern string) bool {
	return regexp.MustCompile(`(?m)^([^#\n]*[\s:])?` + pattern + `(\s|;|$)`).MatchString(ruleset)
}

// Running is what is known of the reconciler of the node.
type Running struct {
	Active bool      // a process holds the instance lock of the dataDir
	Seen   time.Time // when a reconciler last made a sync; zero if none did
	Err    error     // why the active one does not answer
	// ManagesConflist tells that the reconciler reports a missing plugin entry as a fault.
	ManagesConflist bool
}

func reconcilerNotRunning(e *examination, f *Finding) {
	r := e.Reconciler
	if r == nil || r.Active {
		return
	}
	if !r.Seen.IsZero() {
		f.add("no process holds the instance lock of %s; a reconciler last made a sync %s ago, at %s",
			policy.Quote(e.DataDir), Age(time.Since(r.Seen)), r.Seen.UTC().Format(time.RFC3339))
		return
	}
	if len(e.State.Sources) > 0 { // the plugin alone
		f.Severity = SeverityNotice
		f.add("none has run with %s", policy.Quote(e.DataDir))
	}
}

func reconcilerNotAnswering(e *examination, f *Finding) {
	r := e.Reconciler
	if r != nil && r.Active && r.Err != nil {
		f.add("%v; look on the host for its process (ps -C ip-masq-reconciler)", r.Err)
	}
}

func podsWithoutRecord(e *examination, f *Finding) {
	for _, p := range e.Rules.Policies() {
		if len(p.Namespaces) > 0 {
			f.Details = append(f.Details, e.PodsWithoutRecord...)
			return
		}
	}
}
