// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"bytes"
	"fmt"
	"slices"
	"strings"

	"go4.org/netipx"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// Render writes the tables of the families, of all if none is named, as input
// for `nft -f`: to load it leaves what Apply would on a node without our tables,
// whatever they held before. A family without a chain loses its table.
//
// It is one transaction, yet to packets not always one moment: while a table is
// made anew some were seen to meet its sets empty. Apply avoids that.
func Render(rs policy.Ruleset, families ...policy.Family) []byte {
	if len(families) == 0 {
		families = policy.Families()
	}
	var b bytes.Buffer
	b.WriteString("# Load with: nft -f FILE\n" +
		"# It makes the tables anew. A connection that begins at that very moment may be treated wrongly;\n" +
		"# ip-masq-reconciler once changes only what differs, and avoids that.\n")
	for _, f := range families {
		p := planTable(f, &table{}, chainsOf(rs, f))
		t := tableText{Buffer: &b, plan: p, name: headerOf(f).link.String() + " " + tableName}
		t.write(!p.empty())
	}
	return b.Bytes()
}

func chainsOf(rs policy.Ruleset, f policy.Family) []policy.Chain {
	return slices.DeleteFunc(slices.Clone(rs.Chains), func(c policy.Chain) bool { return c.Family != f })
}

// tableText writes the plan of a table that is not there yet.
type tableText struct {
	*bytes.Buffer
	*plan
	name string // with the family
}

// write makes sure that the table is not there and, if it is wanted, defines it.
// Only what is there can be deleted.
func (t *tableText) write(wanted bool) {
	fmt.Fprintf(t, "\nadd table %s\ndelete table %s\n", t.name, t.name)
	if !wanted {
		return
	}
	fmt.Fprintf(t, "table %s {\n", t.name)
	for _, s := range t.newSets {
		t.set(s)
	}
	base := wantedBase()
	t.chain(baseChain, fmt.Sprintf("type %s hook postrouting priority %d; policy accept;", base.Type, base.Priority), func() {
		for _, r := range t.jumps {
			for i, j := range r.chain.Jumps {
				t.rule(j, r.sets[i], chainPrefix+r.chain.Name, "")
			}
		}
	})
	for _, r := range t.rewrite {
		t.chain(chainPrefix+r.chain.Name, "", func() {
			for i, rule := range r.chain.Rules {
				t.rule(rule, r.sets[i], "", commentOn(r.chain, i))
			}
		})
	}
	t.WriteString("}\n")
}

func (t *tableText) set(s set) {
	key := "ipv4_addr"
	if t.family == policy.IPv6 {
		key = "ipv6_addr"
	}
	fmt.Fprintf(t, "\tset %s {\n\t\ttype %s\n\t\tflags interval\n", s.name, key)
	if len(s.ranges) > 0 { // braces with nothing in them nft does not take
		t.WriteString("\t\telements = {\n")
		for _, r := range s.ranges {
			fmt.Fprintf(t, "\t\t\t%s,\n", elementText(r))
		}
		t.WriteString("\t\t}\n")
	}
	t.WriteString("\t}\n")
}

func elementText(r netipx.IPRange) string {
	if p, ok := r.Prefix(); ok {
		return p.String()
	}
	return r.From().String() + "-" + r.To().String()
}

func (t *tableText) chain(name, hook string, rules func()) {
	fmt.Fprintf(t, "\tchain %s {\n", name)
	if hook != "" {
		fmt.Fprintf(t, "\t\t%s\n", hook)
	}
	rules()
	t.WriteString("\t}\n")
}

// rule writes a rule as nft lists what encode makes of it.
func (t *tableText) rule(r policy.Rule, set, target, comment string) {
	if r.Verdict == policy.Unrecognized {
		fmt.Fprintf(t, "\t\t# left out, not ours: %s\n", policy.Quote(r.Text))
		return
	}
	words := append(matchText(t.family, r, set), verdictText(r, target)...)
	if comment != "" {
		words = append(words, `comment "`+comment+`"`)
	}
	fmt.Fprintf(t, "\t\t%s\n", strings.Join(words, " "))
}

func matchText(f policy.Family, r policy.Rule, set string) []string {
	var w []string
	header := headerOf(f).link.String()
	if r.From != nil {
		w = append(w, header+" saddr @"+set)
	}
	if r.To != nil {
		w = append(w, header+" daddr @"+set)
	}
	if r.Out != "" {
		name := r.Out
		if prefix, wild := strings.CutSuffix(name, "+"); wild {
			name = prefix + "*"
		}
		w = append(w, `oifname "`+name+`"`)
	}
	if r.NotFromLocal {
		w = append(w, "fib saddr type != local")
	}
	if r.NotToLocal {
		w = append(w, "fib daddr type != local")
	}
	if r.Protocol != "" {
		w = append(w, "meta l4proto "+string(r.Protocol))
	}
	if r.Share != 0 {
		w = append(w, fmt.Sprintf("numgen random mod %d < %d", policy.ShareUnit, r.Share))
	}
	return w
}

func verdictText(r policy.Rule, target string) []string {
	switch r.Verdict {
	case policy.Jump:
		return []string{"jump " + target}
	case policy.Return:
		return []string{"counter return"}
	}
	w := []string{"counter masquerade"}
	if !r.Ports.IsZero() {
		w = append(w, "to :"+r.Ports.String())
	}
	if r.RandomFully {
		w = append(w, "fully-random")
	}
	return w
}
