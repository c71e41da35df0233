// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"fmt"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// extension is a match or the target of a rule, in the form that xtables has
// for it in either variant of iptables.
type extension struct {
	name     string
	revision uint32
	info     []byte
}

func (x extension) String() string { return fmt.Sprintf("%s (revision %d)", x.name, x.revision) }

// match reads a match.
func (r *reading) match(x extension) {
	switch x.name {
	case "comment":
		if text, err := nfnetlink.DecodeComment(x.revision, x.info); err != nil {
			r.refuse(x.String() + ": " + err.Error())
		} else {
			r.comment(text)
		}
	case "addrtype":
		r.addressTypes(x)
	case "statistic":
		switch s, err := nfnetlink.DecodeStatistic(x.revision, x.info); {
		case err != nil:
			r.refuse(x.String() + ": " + err.Error())
		case s.Invert || s.Mode == nfnetlink.StatisticNth:
			r.refuse("match statistic of another kind")
		default:
			r.random(s.Probability)
		}
	default:
		r.refuse("match " + x.String())
	}
}

func (r *reading) addressTypes(x extension) {
	a, err := nfnetlink.DecodeAddrType(x.revision, x.info)
	if err != nil {
		r.refuse(x.String() + ": " + err.Error())
		return
	}
	for _, side := range []struct {
		types, invert uint32
		notLocal      *bool
	}{
		{uint32(a.Source), nfnetlink.AddrTypeInvertSource, &r.rule.NotFromLocal},
		{uint32(a.Dest), nfnetlink.AddrTypeInvertDest, &r.rule.NotToLocal},
	} {
		switch {
		case side.types == 0: // not looked at
		case side.types == uint32(nfnetlink.AddrTypeLocal) && a.Flags&side.invert != 0:
			*side.notLocal = true
		default:
			r.refuse("match addrtype of another kind")
		}
	}
	if a.Flags&^(nfnetlink.AddrTypeInvertSource|nfnetlink.AddrTypeInvertDest) != 0 {
		r.refuse("match addrtype of one interface")
	}
}

// targetExtension reads a target that is neither a chain nor a verdict.
func (r *reading) targetExtension(f policy.Family, x extension) {
	if x.name != "MASQUERADE" {
		r.jump(x.name) // what another target does is as little known as a chain
		return
	}
	m, err := nfnetlink.DecodeMasquerade(nftFamily(f), x.revision, x.info)
	switch {
	case err != nil:
		r.refuse(x.String() + ": " + err.Error())
	case m.Flags&^(nfnetlink.RangeProtoSpecified|nfnetlink.RangeRandomFully) != 0:
		r.refuse("target MASQUERADE of another kind")
	}
	r.rule.RandomFully = m.Flags&nfnetlink.RangeRandomFully != 0
	if m.Flags&nfnetlink.RangeProtoSpecified != 0 {
		r.portRange(m.PortMin, m.PortMax)
	}
	r.verdict(policy.Masquerade)
}
