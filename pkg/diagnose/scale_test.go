// SPDX-License-Identifier: Apache-2.0

package diagnose

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
)

// threadTime returns the processor time of the thread, which isolate keeps for the test.
func threadTime(t *testing.T) time.Duration {
	t.Helper()
	var used unix.Rusage
	assert.NoError(t, unix.Getrusage(unix.RUSAGE_THREAD, &used))
	return time.Duration(used.Utime.Nano() + used.Stime.Nano())
}

// linkUp makes the interface of the default route.
func linkUp(t *testing.T) {
	t.Helper()
	feed(t, "ip link add eth0 type bridge\nip link set eth0 up\nip address add 192.0.2.10/24 dev eth0\nip route add default via 192.0.2.1\n", "sh", "-e")
}

// manyPrefixes are 10,000 of 128 addresses.
func manyPrefixes() (all []netip.Prefix) {
	for i := range 10_000 {
		all = append(all, netip.MustParsePrefix(fmt.Sprintf("10.%d.%d.0/25", i/256, i%256)))
	}
	return all
}

// TestManyExemptPrefixes counts third-party rules beside 10,000 exempt prefixes, which each scrape of the
// metrics does: Docker's rule for its network, and 4,000 for its ports.
func TestManyExemptPrefixes(t *testing.T) {
	const most = 500 * time.Millisecond
	isolate(t)
	linkUp(t)
	lines := []string{"-A POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE"}
	for i := range 4000 {
		container := fmt.Sprintf("172.17.%d.%d/32", i/256, i%256)
		lines = append(lines, "-A POSTROUTING -s "+container+" -d "+container+" -p tcp -m tcp --dport 80 -j MASQUERADE")
	}
	restoreNAT(t, netfilter.VariantNFT, lines...)
	h := newHost(t)
	h.policies[0].NonMasqueradeCIDRs = manyPrefixes()
	n := h.node()
	began := threadTime(t)
	count := assert.Must(CountThirdParty(n))(t)
	took := threadTime(t) - began
	assert.Equal(t, "rules", count, 0)
	t.Logf("%v", took)
	if took > most {
		t.Errorf("took %v of a processor, want at most %v", took, most)
	}
}

// jumps is 100 chains, each with two jumps to the next one and a change of the mark between them: packets
// that get there have 2^100 ways. No packet of the protocol does.
func jumps() []string {
	const chains = 100
	lines := []string{"-A POSTROUTING -p 250 -j C0"}
	for i := range chains {
		jump := fmt.Sprintf("-A C%d -j C%d", i, i+1)
		lines = append([]string{fmt.Sprintf(":C%d -", i)}, lines...)
		lines = append(lines, jump, fmt.Sprintf("-A C%d -j MARK --xor-mark %#x", i, 1<<(i%32)), jump)
	}
	return append([]string{fmt.Sprintf(":C%d -", chains)}, append(lines, fmt.Sprintf("-A C%d -j MASQUERADE", chains))...)
}

// TestHostileRulesets has rules that are many, about many addresses, or that packets reach in many ways. It
// takes as long as so many plain rules may, or where not all can be asked about, as maxSteps do.
func TestHostileRulesets(t *testing.T) {
	const most, mostSteps = time.Second, 2 * time.Second
	nft := func(form string, rules int) func(*testing.T) {
		return func(t *testing.T) {
			var text strings.Builder
			text.WriteString("table ip x {\nset s { type ipv4_addr; elements = {\n")
			for i := range 60_000 {
				fmt.Fprintf(&text, "10.%d.%d.%d,\n", i>>16, i>>8&0xff, i&0xff)
			}
			text.WriteString("} }\nchain c { type nat hook postrouting priority srcnat\n")
			for i := range rules {
				fmt.Fprintf(&text, form+"\n", i)
			}
			text.WriteString("}\n}\n")
			feed(t, text.String(), "nft", "-f", "-")
		}
	}
	iptables := func(form string) func(*testing.T) {
		return func(t *testing.T) {
			var lines []string
			for i := range 4000 {
				lines = append(lines, strings.NewReplacer("ADDRESS", fmt.Sprintf("10.%d.%d.7", i/256, i%256), "PORT", fmt.Sprint(i)).Replace(form))
			}
			restoreNAT(t, netfilter.VariantNFT, lines...)
		}
	}
	for _, tc := range []struct {
		name              string
		write             func(*testing.T)
		exempt            []netip.Prefix
		certain, possible int // rules that are found
	}{
		{"4,000 plain rules", iptables("-A POSTROUTING -s 10.244.0.0/16 -d ADDRESS/32 -j MASQUERADE"), nil, 4000, 0},
		{"4,000 addresses, of a protocol", iptables("-A POSTROUTING -d ADDRESS/32 -p tcp -j MASQUERADE"), nil, 0, 4000},
		{"4,000 ports", iptables("-A POSTROUTING -p tcp -m tcp --dport PORT -j MASQUERADE"), nil, 0, 4000},
		{"4,000 ports, 10,000 exempt prefixes", iptables("-A POSTROUTING -p tcp -m tcp --dport PORT -j MASQUERADE"), manyPrefixes(), 0, 4000},
		{"60,000 addresses in 100 rules", nft("ip saddr 10.244.1.%d ip daddr @s masquerade", 100), nil, 100, 0},
		{"60,000 addresses in 100 rules about ports", nft("tcp dport %d ip daddr @s masquerade", 100), nil, 0, 100},
		{"60,000 addresses in one of 4,000 rules", func(t *testing.T) {
			nft("ip daddr @s meta l4proto tcp masquerade comment \"%d\"", 1)(t)
			iptables("-A POSTROUTING -p tcp -m tcp --dport PORT -j MASQUERADE")(t)
		}, nil, 0, 4001},
		{"many ways", func(t *testing.T) { restoreNAT(t, netfilter.VariantLegacy, jumps()...) }, nil, 0, 1},
	} {
		t.Run(tc.name, func(t *testing.T) {
			isolate(t)
			linkUp(t)
			tc.write(t)
			h := newHost(t)
			h.policies[0].NonMasqueradeCIDRs = tc.exempt
			e := &examination{Host: h.node()}
			e.readLists()
			e.readPodNetworks()
			began := threadTime(t)
			assert.NoError(t, e.findViolations())
			took := threadTime(t) - began
			certain := 0
			for _, v := range e.violations {
				if v.doubt == "" {
					certain++
				}
			}
			assert.Equal(t, "rules that translate for certain, and perhaps", [2]int{certain, len(e.violations) - certain}, [2]int{tc.certain, tc.possible})
			t.Logf("%v", took)
			if took > mostSteps || tc.certain > 0 && took > most {
				t.Errorf("took %v of a processor, want at most %v", took, most)
			}
		})
	}
}
