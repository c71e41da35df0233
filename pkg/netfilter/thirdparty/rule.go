// SPDX-License-Identifier: Apache-2.0

package thirdparty

import (
	"fmt"
	"slices"
	"strings"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// Place is a chain in the kernel.
type Place struct {
	Backend      policy.Backend
	Variant      string // of iptables
	Family       policy.Family
	Table, Chain string
	Owner        policy.Owner // as a comment in the chain states, zero before the chain is read
	Priority     int32        // of the base chain
}

// Action is what a rule does with packets.
type Action string

// The actions.
const (
	Masquerades Action = "masquerade"
	Translates  Action = "snat" // to an address that the rule states
	Accepts     Action = "accept"
	Returns     Action = "return"
	Untracks    Action = nfnetlink.NoTrack // its packets are unknown to conntrack, and so to NAT

	isOwned Action = "owned" // not a rule, but an owned chain
)

// Rule is a rule of another program.
type Rule struct {
	Place
	Action Action
	Match  Packets // what the rule and the jumps that lead to it match, as far as it could be decoded
	// Exact tells that Unread is empty. Otherwise the rule may apply to fewer packets.
	Exact  bool
	Unread []string // parts of the rule and of earlier rules that were not decoded

	Comment string
	Text    string // the rule on one line, for messages

	reached []Packets // the packets of Match that earlier rules leave
	certain bool      // it decides about all of these
	base    *Place    // its base chain
}

// Destinations returns the destinations for which the rule changes the source of packets from one
// of the sources, nil being any.
func (r Rule) Destinations(from policy.Ranges) policy.Ranges {
	out := policy.Ranges{}
	for _, p := range r.reached {
		if p.From.Overlaps(from) {
			out = append(out, policy.RangesOf(r.Family.All()).Intersect(p.To)...)
		}
	}
	return policy.Normalize(out)
}

// text returns the rule: nftables, ipv4, table t, chain c: from 172.17.0.0/16 masquerade.
func (r Rule) text(c condition) string {
	words := []string{r.side("from", c.From)}
	if c.notOrigins == fromNode {
		words = append(words, "from non-local")
	}
	words = append(words, r.side("to", c.To))
	if c.Out != "" {
		words = append(words, "out "+plain(c.Out))
	}
	for _, not := range c.NotOut {
		words = append(words, "not out "+plain(not))
	}
	words = append(words, string(c.protocol), string(r.Action))
	if r.Comment != "" {
		words = append(words, "("+policy.Quote(r.Comment)+")")
	}
	words = slices.DeleteFunc(words, func(w string) bool { return w == "" })
	text := strings.Join(words, " ")
	if !r.Exact {
		text += "; not decoded: " + strings.Join(r.Unread, ", ")
	}
	choice := netfilter.Choice{Backend: r.Backend, Variant: r.Variant}
	return fmt.Sprintf("%s, %s, table %s, chain %s: %s", choice, r.Family, plain(r.Table), plain(r.Chain), text)
}

// side writes addresses, or those that are missing if these are fewer.
func (r Rule) side(word string, ranges policy.Ranges) string {
	if ranges == nil {
		return ""
	}
	rest := policy.RangesOf(r.Family.All()).Without(ranges)
	if len(rest) > 0 && len(rest) < len(ranges) {
		return "not " + word + " " + rest.String()
	}
	return word + " " + ranges.String()
}

// plain quotes a name only if it has characters that could mislead.
func plain(name string) string {
	if quoted := policy.Quote(name); quoted != `"`+name+`"` || strings.ContainsAny(name, " ,;:") {
		return quoted
	}
	return name
}
