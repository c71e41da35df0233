// SPDX-License-Identifier: Apache-2.0

package thirdparty

import (
	"fmt"
	"strings"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// text writes iptables (nft), ipv4, table nat, chain POSTROUTING: from
// 172.17.0.0/16 not out docker0 masquerade.
func (r Rule) text() string {
	words := []string{r.side("from", r.Rule.From)}
	if r.Rule.NotFromLocal {
		words = append(words, "from non-local")
	}
	words = append(words, r.side("to", r.Rule.To))
	if r.Rule.NotToLocal {
		words = append(words, "to non-local")
	}
	if r.Rule.Out != "" {
		words = append(words, "out "+plain(r.Rule.Out))
	}
	for _, not := range r.NotOut {
		words = append(words, "not out "+plain(not))
	}
	words = append(words, string(r.Rule.Protocol))
	if r.Rule.Share != 0 {
		words = append(words, fmt.Sprintf("%.2f%%", 100*float64(r.Rule.Share)/policy.ShareUnit))
	}
	words = append(words, string(r.Action))
	if r.Comment != "" {
		words = append(words, "("+policy.Quote(r.Comment)+")")
	}
	text := strings.Join(strings.Fields(strings.Join(words, " ")), " ")
	if r.Marked {
		text += "; marked packets only"
	} else if !r.Exact {
		text += "; not read: " + strings.Join(r.Unread, ", ")
	}
	choice := netfilter.Choice{Backend: r.Backend, Variant: r.Variant}
	return fmt.Sprintf("%s, %s, table %s, chain %s: %s", choice, r.Family, plain(r.Table), plain(r.Chain), text)
}

// side writes a set of addresses, or what is missing from it if that is shorter.
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

// plain writes a name of somebody else's bare where that is no risk.
func plain(name string) string {
	if quoted := policy.Quote(name); quoted != `"`+name+`"` || strings.ContainsAny(name, " ,;:") {
		return quoted
	}
	return name
}
