// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"bytes"
	"fmt"
	"regexp"
	"strings"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// render writes the chains of one family as input for `iptables-restore --noflush`.
// Loading it replaces the rules of each chain and appends the jumps: iptables-restore
// cannot skip jumps that exist, and fails as a whole if it is to delete one that
// does not. A rule's arguments are in the order in which `iptables -S` prints them.
func render(rs policy.Ruleset, f policy.Family) []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, "# Load with: %s-restore --noflush FILE\n"+
		"# Each loading appends the jumps again. A duplicate jump changes no packet;\n"+
		"# `ip-masq-reconciler once` removes it.\n", baseName(f))
	var t transaction
	for i := range rs.Chains {
		if c := &rs.Chains[i]; c.Family == f {
			t.fill(c)
			for _, j := range c.Jumps {
				t.appendJump(j, c.Name)
			}
		}
	}
	b.Write(t.restore())
	return b.Bytes()
}

// transaction collects what one run of iptables-restore does in table nat.
type transaction struct {
	declared, jumps, rules, deleted []string
}

// empty reports whether there is nothing to do.
func (t *transaction) empty() bool {
	return len(t.declared)+len(t.jumps)+len(t.rules)+len(t.deleted) == 0
}

// declare creates the chain, or flushes it if it exists.
func (t *transaction) declare(chain string) {
	t.declared = append(t.declared, ":"+chain+" - [0:0]")
}

// fill replaces the rules of the chain. The last one has the owner as its comment.
func (t *transaction) fill(c *policy.Chain) {
	t.declare(c.Name)
	for i, r := range c.Rules {
		comment := ""
		if i == len(c.Rules)-1 {
			comment = c.Owner.Comment()
		}
		t.rules = append(t.rules, ruleCommand(r, c.Name, c.Name, comment))
	}
}

// appendJump adds a jump to the end of POSTROUTING.
func (t *transaction) appendJump(j policy.Rule, chain string) {
	comment := ""
	if j.Equal(policy.Rule{NotToLocal: true, Verdict: policy.Jump}) {
		comment = agentJumpComment(chain)
	}
	t.jumps = append(t.jumps, ruleCommand(j, postrouting, chain, comment))
}

// deleteJump deletes the first rule of POSTROUTING that is exactly the one that
// `iptables -S` printed.
func (t *transaction) deleteJump(line string) error {
	if strings.Contains(line, "\n") {
		// iptables-restore would read the second line as a command.
		return fmt.Errorf("delete the jump %s: iptables-restore cannot take a comment with a line feed; delete it with iptables -D",
			policy.Quote(line))
	}
	t.jumps = append(t.jumps, "-D"+strings.TrimPrefix(line, "-A"))
	return nil
}

// deleteChain deletes the chain after the jumps to it.
func (t *transaction) deleteChain(chain string) {
	t.declare(chain)
	t.deleted = append(t.deleted, "-X "+chain)
}

// restore returns the transaction as input for iptables-restore.
func (t *transaction) restore() []byte {
	var b bytes.Buffer
	b.WriteString("*" + natTable + "\n")
	for _, lines := range [][]string{t.declared, t.jumps, t.rules, t.deleted} {
		for _, line := range lines {
			b.WriteString(line + "\n")
		}
	}
	b.WriteString("COMMIT\n")
	return b.Bytes()
}

// agentJumpComment is the comment with which ip-masq-agent, from 2.10 on, looks for
// its jump by `iptables -C`. If there is none with this very text, the agent adds
// another jump every minute.
func agentJumpComment(chain string) string {
	return "ip-masq-agent: ensure nat POSTROUTING directs all non-LOCAL destination traffic to our custom " + chain + " chain"
}

// ruleCommand writes a rule as an -A command. A rule in the layout of this backend has
// at most one source prefix and one destination prefix.
func ruleCommand(r policy.Rule, chain, target, comment string) string {
	w := []string{"-A", chain}
	for _, side := range []struct {
		option string
		ranges policy.Ranges
	}{{"-s", r.From}, {"-d", r.To}} {
		for _, p := range side.ranges {
			if prefix, _ := p.Prefix(); prefix.Bits() > 0 {
				w = append(w, side.option, prefix.String())
			}
		}
	}
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
		w = append(w, fmt.Sprintf("-m statistic --mode random --probability %.11f", float64(r.Probability)/policy.ProbabilityScale))
	}
	switch r.Verdict {
	case policy.Jump:
		w = append(w, "-j", target)
	case policy.Return:
		w = append(w, "-j RETURN")
	case policy.Masquerade:
		w = append(w, "-j MASQUERADE")
		if !r.Ports.IsZero() {
			w = append(w, "--to-ports", r.Ports.String())
		}
		if r.RandomFully {
			w = append(w, "--random-fully")
		}
	}
	return strings.Join(w, " ")
}

// quote writes an argument as `iptables -S` does, in quotes if necessary.
func quote(s string) string {
	if regexp.MustCompile(`^[\w.+/@=][\w.+/@=-]*$`).MatchString(s) {
		return s
	}
	return `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`, `'`, `\'`).Replace(s) + `"`
}
