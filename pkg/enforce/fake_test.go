// SPDX-License-Identifier: Apache-2.0

package enforce_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/netfiltertest"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

var errRefused = errors.New("refused")

// kernel is a packet filter that fails on demand, and has a log.
type kernel struct {
	*netfiltertest.Kernel
	fail    map[string]error // effects, by the beginnings of their texts
	most    int              // so many effects fail; 0: all of them
	undone  map[string]int   // so many coming effects are reverted at once, in part
	effects []string
	log     []string // every write
}

const (
	inNFTables = "nftables"
	inIPTables = "iptables (nft)"
	writeRules = "write " + inIPTables
	checkRules = "ask for a write of " + inIPTables
	mayWrite   = "ask for the right to write "
	readGuards = "observe guards"
)

func newKernel() *kernel {
	k := &kernel{Kernel: netfiltertest.New()}
	k.Before = func(effect string, _ bool) error {
		k.effects = append(k.effects, effect)
		for beginning, err := range k.fail {
			if strings.HasPrefix(effect, beginning) {
				if k.most--; k.most == 0 {
					k.fail = nil
				}
				return err
			}
		}
		return nil
	}
	k.After = func(effect string, touched ...string) {
		what, isRules := strings.CutPrefix(effect, "write ")
		switch {
		case strings.HasPrefix(effect, "remove "):
			k.log = append(k.log, "remove "+strings.Join(touched, " "))
		case what == "guards":
			k.log = append(k.log, guardsText(k.Guards))
		case isRules:
			k.log = append(k.log, "rules of "+strings.TrimSuffix(what, " ipv4"))
		}
		for beginning := range k.undone {
			if !strings.HasPrefix(effect, beginning) {
				continue
			}
			if k.undone[beginning]--; k.undone[beginning] >= 0 && what == "guards" {
				k.Guards = nil
			} else if k.undone[beginning] >= 0 {
				k.reviseChains(func(in netfilter.Choice, c *policy.Chain) {
					if strings.Contains(effect, in.String()) {
						c.Jumps = nil
					}
				})
			}
		}
	}
	return k
}

// reviseChains changes all chains as another program does.
func (k *kernel) reviseChains(revise func(netfilter.Choice, *policy.Chain)) {
	for choice, chains := range k.Chains {
		for ref, c := range chains {
			c.Rules = slices.Clone(c.Rules)
			revise(choice, &c)
			chains[ref] = c
		}
	}
	k.Changed()
}

// count returns how many effects began with a text.
func (k *kernel) count(beginning string) int {
	return len(slices.DeleteFunc(slices.Clone(k.effects), func(e string) bool { return !strings.HasPrefix(e, beginning) }))
}

// dump returns all chains in the kernel.
func (k *kernel) dump() string {
	var lines []string
	for choice, chains := range k.Chains {
		for ref, c := range chains {
			lines = append(lines, fmt.Sprintf("%s %s %s: jumps %v, rules %v", choice, ref.Family, ref.Chain, c.Jumps, c.Rules))
		}
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

func guardsText(guards []policy.Guard) string {
	text := "guards:"
	for _, g := range guards {
		text += fmt.Sprintf(" %s %s pods %v exempt %v", g.Chain, g.Mode, g.Scope.Sources, withoutMulticast(g.Exempt))
	}
	return text
}

// withoutMulticast returns what a policy exempts by its keys.
func withoutMulticast(exempt policy.Ranges) policy.Ranges {
	return exempt.Without(policy.RangesOf(policy.IPv4.Multicast()...))
}
