// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// Render writes the chains of one family as input for `iptables-restore --noflush`. It appends the
// jumps: iptables-restore cannot skip those that exist, and fails as a whole if it is to delete one
// that does not. A rule's arguments are in the order in which `iptables -S` prints them.
func Render(rs policy.Ruleset, f policy.Family) []byte {
	head := fmt.Sprintf("# Load with: %s-restore --noflush FILE\n"+
		"# Each loading appends the jumps again. A duplicate jump changes no packet;\n"+
		"# `ip-masq-reconciler once` removes it.\n", baseName(f))
	var t transaction
	for i := range rs.Chains {
		if c := &rs.Chains[i]; c.Family == f {
			t.fill(c)
			t.appendJumps(c.Jumps, c.Name)
		}
	}
	return append([]byte(head), t.restore()...)
}

// transaction collects what one run of iptables-restore does in table nat.
type transaction struct {
	declared, jumps, rules, deleted []string
}

// lines are those that iptables-restore reads, in their order.
func (t *transaction) lines() []string {
	return slices.Concat(t.declared, t.jumps, t.rules, t.deleted)
}

func (t *transaction) empty() bool { return len(t.lines()) == 0 }

// fill creates the chain or replaces its rules. The last rule has the owner as its comment, where
// `iptables -L` shows it.
func (t *transaction) fill(c *policy.Chain) {
	t.declared = append(t.declared, ":"+c.Name+" - [0:0]")
	for i, r := range c.Rules {
		comment := ""
		if i == len(c.Rules)-1 {
			comment = c.Owner.Comment()
		}
		t.rules = append(t.rules, ruleCommand(r, c.Name, c.Name, comment))
	}
}

// remove empties the chain, and deletes it after the jumps to it.
func (t *transaction) remove(chain string) {
	t.declared = append(t.declared, ":"+chain+" - [0:0]")
	t.deleted = append(t.deleted, "-X "+chain)
}

func (t *transaction) appendJumps(jumps []policy.Rule, chain string) {
	for _, j := range jumps {
		comment := ""
		if j.Equal(policy.Rule{Match: policy.Match{NotToLocal: true}, Verdict: policy.Jump}) {
			comment = agentJumpComment(chain)
		}
		t.jumps = append(t.jumps, ruleCommand(j, postrouting, chain, comment))
	}
}

// deleteJumps deletes those of the jumps with these numbers. iptables-restore deletes by text: of
// duplicates each -D deletes the first. A line feed is an obstacle: iptables-restore would read what
// follows as another command.
func (t *transaction) deleteJumps(lines []string, numbers []int) error {
	for _, i := range numbers {
		if strings.Contains(lines[i], "\n") {
			return obstacle{errors.New("a jump has a line feed in its comment, which iptables-restore cannot " +
				"read: delete it with iptables -D")}
		}
		t.jumps = append(t.jumps, "-D"+strings.TrimPrefix(lines[i], "-A"))
	}
	return nil
}

// restore returns the transaction as input for iptables-restore.
func (t *transaction) restore() []byte {
	all := slices.Concat([]string{"*" + Table}, t.lines(), []string{"COMMIT", ""})
	return []byte(strings.Join(all, "\n"))
}

// agentJumpComment is the comment by which ip-masq-agent, from 2.10 on, looks for its jump. Without
// this very text the agent adds another jump every minute.
func agentJumpComment(chain string) string {
	return "ip-masq-agent: ensure nat POSTROUTING directs all non-LOCAL destination traffic to our custom " +
		chain + " chain"
}

// ruleCommand writes a rule, of at most one source and one destination prefix, as an -A command.
func ruleCommand(r policy.Rule, chain, target, comment string) string {
	w := []string{"-A", chain}
	w = appendPrefixes(w, "-s", r.From)
	w = appendPrefixes(w, "-d", r.To)
	if r.Out != "" {
		w = append(w, "-o", quote(r.Out))
	}
	if r.Protocol != "" {
		w = append(w, "-p", string(r.Protocol))
	}
	if comment != "" {
		w = append(w, "-m comment --comment", quote(comment))
	}
	if r.NotFromLocal || r.NotToLocal {
		w = append(w, "-m addrtype")
	}
	if r.NotFromLocal {
		w = append(w, "! --src-type LOCAL")
	}
	if r.NotToLocal {
		w = append(w, "! --dst-type LOCAL")
	}
	if r.Probability != 0 {
		share := float64(r.Probability) / policy.ProbabilityScale
		w = append(w, fmt.Sprintf("-m statistic --mode random --probability %.11f", share))
	}
	switch r.Verdict {
	case policy.Jump:
		w = append(w, "-j", target)
	case policy.Return:
		w = append(w, "-j RETURN")
	case policy.Masquerade:
		w = append(w, translation(r))
	}
	if r.RandomFully {
		w = append(w, "--random-fully")
	}
	return strings.Join(w, " ")
}

// appendPrefixes appends the prefixes of a match. One that matches all addresses is no match.
func appendPrefixes(w []string, option string, ranges policy.Ranges) []string {
	for _, r := range ranges {
		p, _ := r.Prefix()
		if p.Bits() > 0 {
			w = append(w, option, p.String())
		}
	}
	return w
}

// translation writes the target of a rule that masquerades, with its ports.
func translation(r policy.Rule) string {
	ports := r.Ports.String()
	if !r.Address.IsValid() {
		if r.Ports.IsZero() {
			return "-j MASQUERADE"
		}
		return "-j MASQUERADE --to-ports " + ports
	}
	to := r.Address.String()
	if r.Ports.IsZero() {
		return "-j SNAT --to-source " + to
	}
	if r.Address.Is6() {
		to = "[" + to + "]"
	}
	return "-j SNAT --to-source " + to + ":" + ports
}

// quote writes an argument as `iptables -S` does, in quotes if necessary.
func quote(s string) string {
	if isPlain(s) {
		return s
	}
	return `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`, `'`, `\'`).Replace(s) + `"`
}

// isPlain reports whether an argument needs no quotes.
func isPlain(s string) bool {
	const plain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.+/@=-"
	if s == "" || s[0] == '-' {
		return false
	}
	for _, r := range s {
		if !strings.ContainsRune(plain, r) {
			return false
		}
	}
	return true
}
