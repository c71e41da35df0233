// SPDX-License-Identifier: Apache-2.0

package thirdparty

import (
	"os/exec"
	"strings"
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// printed returns the rules of the chain by which packets leave as this package prints them.
func printed(t *testing.T, table string) (lines []string) {
	t.Helper()
	for _, b := range ruleset(t, policy.IPv4).hooks {
		if b.place.Table != table {
			continue
		}
		for _, r := range b.chains[b.name].rules {
			lines = append(lines, r.text())
		}
	}
	return lines
}

// listed returns the lines of a program's output with a prefix, without white space around them.
func listed(t *testing.T, prefix string, program ...string) (lines []string) {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), program[0], program[1:]...).Output()
	assert.NoError(t, err)
	for line := range strings.Lines(string(out)) {
		line = strings.TrimSpace(line)
		if strings.HasPrefix(line, prefix) {
			lines = append(lines, line)
		}
	}
	return lines
}

// TestTextOfIPTables holds the text of rules to that of iptables-save.
func TestTextOfIPTables(t *testing.T) {
	rules := []string{
		"-s 10.0.0.0/8 ! -d 10.9.9.9 ! -o eth+ -j MASQUERADE", "-o wg0 -p tcp -j MASQUERADE --to-ports 1024-65535 --random-fully",
		"-p tcp -m tcp --dport 80 -j RETURN", "-p udp -m udp --sport 53 --dport 1024:2000 -j ACCEPT", "! -p tcp -j MASQUERADE --random",
		"-m mark ! --mark 0x4000/0x4000 -j RETURN", "-m mark --mark 0x7 -j MASQUERADE", "-j MARK --set-xmark 0x4000/0x4000",
		"-m addrtype ! --dst-type LOCAL -j SNAT --to-source 192.0.2.9 --persistent", "-s 10.1.0.0/255.255.0.255 -j MASQUERADE",
		"-m addrtype --src-type LOCAL --limit-iface-out -j MASQUERADE", `-m comment --comment "a comment" -j MASQUERADE`, "-g A", "-d 10.1.2.3 -j A",
		"-j SNAT --to-source 192.0.2.9 --random-fully",
	}
	lines := []string{":A -"}
	for _, rule := range rules {
		lines = append(lines, "-A POSTROUTING "+rule)
	}
	for _, variant := range []string{netfilter.VariantNFT, netfilter.VariantLegacy} {
		t.Run(variant, func(t *testing.T) {
			isolate(t)
			restore(t, policy.IPv4, variant, lines...)
			assert.Equal(t, "rules", printed(t, "nat"), listed(t, "-A POSTROUTING", "iptables-"+variant+"-save", "-t", "nat"))
		})
	}
}

// TestTextOfNFT holds the text of rules to that of nft.
func TestTextOfNFT(t *testing.T) {
	isolate(t)
	rules := []string{
		"ip saddr 10.0.0.0/8 ip daddr != 10.9.9.9 oifname != \"eth*\" masquerade", "oifname { \"eth0\" } masquerade fully-random",
		"tcp dport 80 return", "udp sport 53 accept", "meta l4proto tcp masquerade to :1024-65535", "meta l4proto tcp meta mark 0x00000007 accept",
		"meta mark & 0x00004000 == 0x00000000 return", "meta mark 0x00000007 masquerade", "ip saddr . ip daddr { 10.0.0.1 . 10.0.0.2 } masquerade",
		"ip daddr . oifname vmap { 10.0.0.1 . \"eth0\" : jump d, 10.0.0.2 . \"eth1\" : accept }", "ip saddr @s masquerade", "snat to 192.0.2.9 persistent",
		"snat to 192.0.2.1-192.0.2.9", "snat to ip saddr map @m", "fib daddr type local accept", "ct state established,new masquerade", "meta mark set meta mark & 0x000000ff",
		"ip saddr 10.0.0.1-10.0.0.9 masquerade", "ip daddr > 10.0.0.9 masquerade", "numgen inc mod 2 0 masquerade", "numgen random mod 3 1 masquerade",
		"ip protocol tcp masquerade", "th dport 53 masquerade", "ip saddr & 0.0.0.3 == 0.0.0.2 masquerade", "goto d",
		"tcp dport . ip saddr { 80 . 10.0.0.1 } masquerade", "masquerade comment \"a comment\"", "meta mark 0x00000001-0x00000005 accept", "tcp dport 80-90 accept",
		"ip daddr { 10.0.0.0/8, 192.168.0.1 } accept", "ip daddr . tcp dport { 10.0.0.0/8 . 80-90 } accept", "meta l4proto { tcp, udp } accept",
		"udp dport != 53 accept", "ip saddr 10.0.0.0/8 update @written { ip saddr } masquerade", "meta mark set 0x00000007", "tcp dport { 80, 443 } accept", "meta l4proto vmap { tcp : jump d, udp : accept }",
	}
	feed(t, "table ip x {\nset s { type ipv4_addr; }\nset written { type ipv4_addr; flags dynamic; size 9; }\nmap m { type ipv4_addr : ipv4_addr; }\nchain d { }\n"+
		"chain c {\ntype nat hook postrouting priority srcnat\n"+strings.Join(rules, "\n")+"\n}\n}\n", "nft", "-f", "-")
	_, all, _ := strings.Cut(strings.Join(listed(t, "", "nft", "list", "chain", "ip", "x", "c"), "\n"), "accept;\n")
	all, _, _ = strings.Cut(all, "\n}")
	assert.Equal(t, "rules", printed(t, "x"), strings.Split(all, "\n"))
}
