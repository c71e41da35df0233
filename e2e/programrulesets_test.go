// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/ip-masq/ip-masq-cni/e2e/topology"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/thirdparty"
)

// programRuleset is rules in the form in which a program writes them, and what they do with packets.
type programRuleset struct {
	name   string
	ipsets map[string][]string // hash:net, with their elements
	script string
	// answers are lines of a source, a destination, and whether the source is translated: yes, no or perhaps.
	answers string
}

func nat(lines string) string {
	return heredoc("iptables-nft-restore --noflush", "*nat\n"+lines+"COMMIT\n")
}

func mangle(lines string) string {
	return heredoc("iptables-nft-restore --noflush", "*mangle\n"+lines+"COMMIT\n")
}

func nft(text string) string { return heredoc("nft -f -", text) }

// programRulesets has pods of a cluster in 10.244.0.0/24 on this node and in 10.244.1.0/24 on another, and a
// container or virtual machine in 172.20.0.0/16.
func programRulesets() []programRuleset {
	const none = `10.244.0.2 10.9.9.9 no
		10.244.0.2 8.8.8.8 no
		172.20.0.5 10.9.9.9 no`
	const kubePostrouting = `:KUBE-POSTROUTING -
-A POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING
`
	const kubeMasquerade = `-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
-A KUBE-POSTROUTING -j MARK --xor-mark 0x4000
-A KUBE-POSTROUTING -m comment --comment "kubernetes service traffic requiring SNAT" -j MASQUERADE --random-fully
`
	return []programRuleset{
		{name: "kube-proxy, iptables", script: nat(":KUBE-MARK-MASQ -\n" + kubePostrouting + "-A KUBE-MARK-MASQ -j MARK --or-mark 0x4000\n" + kubeMasquerade), answers: none},
		{name: "kube-proxy, ipvs", ipsets: map[string][]string{"KUBE-LOOP-BACK": {"192.168.7.7/32"}},
			script: nat(kubePostrouting + `-A KUBE-POSTROUTING -m comment --comment "Kubernetes endpoints dst ip:port, source ip for solving hairpin purpose" -m set --match-set KUBE-LOOP-BACK dst -j MASQUERADE
` + kubeMasquerade),
			answers: `10.244.0.2 10.9.9.9 perhaps
			10.244.0.2 192.168.7.7 perhaps`}, // ipsets are not read
		{name: "kube-proxy, nftables", script: nft(`table ip kube-proxy {
	set cluster-ips { type ipv4_addr; elements = { 10.96.0.1 }; }
	map service-ips { type ipv4_addr . inet_proto . inet_service : verdict; elements = { 10.96.0.1 . tcp . 443 : goto service-kubernetes }; }
	chain service-kubernetes { ip saddr != 10.244.0.0/16 jump mark-for-masquerade; }
	chain mark-for-masquerade { meta mark set meta mark | 0x4000; }
	chain masquerading {
		meta mark & 0x4000 == 0 return
		meta mark set meta mark ^ 0x4000
		masquerade fully-random
	}
	chain nat-prerouting { type nat hook prerouting priority dstnat; ip daddr . meta l4proto . th dport vmap @service-ips; }
	chain nat-postrouting { type nat hook postrouting priority srcnat; jump masquerading; }
}
`), answers: none},
		{name: "Docker 28, iptables", script: nat(`-A POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE
-A POSTROUTING -s 172.20.0.0/16 ! -o br-5f1d6a1c2b3d -j MASQUERADE
-A POSTROUTING -s 172.20.0.9/32 -d 172.20.0.9/32 -p tcp -m tcp --dport 80 -j MASQUERADE
`), answers: `10.244.0.2 10.9.9.9 no
			172.20.0.5 10.9.9.9 yes
			172.20.0.5 8.8.8.8 yes`},
		{name: "Docker 29, nftables", script: nft(`table ip docker-bridges {
	map nat-postrouting-in-jumps { type ifname : verdict; elements = { "docker0" : jump nat-postrouting-in__docker0 }; }
	map nat-postrouting-out-jumps { type ifname : verdict; elements = { "docker0" : jump nat-postrouting-out__docker0, "pod3" : jump nat-postrouting-out__pod3 }; }
	chain nat-postrouting-in__docker0 { }
	chain nat-postrouting-out__docker0 { oifname != "docker0" ip saddr 172.17.0.0/16 counter masquerade comment "MASQUERADE"; }
	chain nat-postrouting-out__pod3 { oifname != "pod3" ip saddr 172.20.0.0/16 counter masquerade comment "MASQUERADE"; }
	chain nat-POSTROUTING {
		type nat hook postrouting priority srcnat; policy accept
		iifname vmap @nat-postrouting-out-jumps
		oifname vmap @nat-postrouting-in-jumps
	}
}
`), answers: `10.244.0.2 10.9.9.9 no
			10.244.0.2 8.8.8.8 no
			172.20.0.5 10.9.9.9 perhaps`}, // by the interface through which it came
		{name: "podman with netavark, iptables", script: nat(`:NETAVARK-HOSTPORT-MASQ -
:NETAVARK-4E1F -
-A POSTROUTING -j NETAVARK-HOSTPORT-MASQ
-A NETAVARK-HOSTPORT-MASQ -m comment --comment "netavark portfw masq mark" -m mark --mark 0x2000/0x2000 -j MASQUERADE
-A POSTROUTING -s 172.20.0.0/16 -j NETAVARK-4E1F
-A NETAVARK-4E1F -d 172.20.0.0/16 -j ACCEPT
-A NETAVARK-4E1F ! -d 224.0.0.0/4 -j MASQUERADE
`), answers: `10.244.0.2 10.9.9.9 no
			172.20.0.5 10.9.9.9 yes`},
		{name: "podman with netavark, nftables", script: nft(`table inet netavark {
	chain nv_4e1f_172_20_0_0_nm16 { ip daddr 172.20.0.0/16 accept; ip daddr != 224.0.0.0/4 masquerade; }
	chain POSTROUTING {
		type nat hook postrouting priority srcnat; policy accept
		meta mark & 0x2000 == 0x2000 masquerade
		ip saddr 172.20.0.0/16 jump nv_4e1f_172_20_0_0_nm16
	}
}
`), answers: `10.244.0.2 10.9.9.9 no
			172.20.0.5 10.9.9.9 yes`},
		{name: "libvirt, iptables", script: nat(`:LIBVIRT_PRT -
-A POSTROUTING -j LIBVIRT_PRT
-A LIBVIRT_PRT -s 172.20.0.0/16 -d 224.0.0.0/24 -j RETURN
-A LIBVIRT_PRT -s 172.20.0.0/16 -d 255.255.255.255/32 -j RETURN
-A LIBVIRT_PRT -s 172.20.0.0/16 ! -d 172.20.0.0/16 -p tcp -j MASQUERADE --to-ports 1024-65535
-A LIBVIRT_PRT -s 172.20.0.0/16 ! -d 172.20.0.0/16 -p udp -j MASQUERADE --to-ports 1024-65535
-A LIBVIRT_PRT -s 172.20.0.0/16 ! -d 172.20.0.0/16 -j MASQUERADE
`), answers: `10.244.0.2 10.9.9.9 no
			172.20.0.5 10.9.9.9 yes`},
		{name: "libvirt, nftables", script: nft(`table ip libvirt_network {
	chain guest_nat {
		type nat hook postrouting priority srcnat; policy accept
		ip saddr 172.20.0.0/16 ip daddr 224.0.0.0/24 counter return
		ip saddr 172.20.0.0/16 ip daddr 255.255.255.255 counter return
		meta l4proto tcp ip saddr 172.20.0.0/16 ip daddr != 172.20.0.0/16 counter masquerade to :1024-65535
		meta l4proto udp ip saddr 172.20.0.0/16 ip daddr != 172.20.0.0/16 counter masquerade to :1024-65535
		ip saddr 172.20.0.0/16 ip daddr != 172.20.0.0/16 counter masquerade
	}
}
`), answers: `10.244.0.2 8.8.8.8 no
			172.20.0.5 8.8.8.8 yes`},
		{name: "LXD", script: nft(`table inet lxd {
	chain pstrt.lxdbr0 { type nat hook postrouting priority srcnat; policy accept; ip saddr 172.20.0.0/16 ip daddr != 172.20.0.0/16 masquerade; }
	chain fwd.lxdbr0 { type filter hook forward priority filter; policy accept; ip version 4 oifname "lxdbr0" accept; }
}
`), answers: `10.244.0.2 10.9.9.9 no
			172.20.0.5 10.9.9.9 yes`},
		{name: "firewalld", script: nft(`table inet firewalld {
	chain nat_POST_external_allow { meta nfproto ipv4 oifname != "lo" masquerade; }
	chain nat_POST_external { jump nat_POST_external_allow; }
	chain nat_POST_trusted_allow { }
	chain nat_POST_trusted { jump nat_POST_trusted_allow; }
	chain nat_POSTROUTING_ZONES { oifname "outside" goto nat_POST_external; goto nat_POST_trusted; }
	chain nat_POSTROUTING { type nat hook postrouting priority srcnat + 10; policy accept; jump nat_POSTROUTING_ZONES; }
}
`), answers: `10.244.0.2 10.9.9.9 no
			10.244.0.2 8.8.8.8 yes
			172.20.0.5 8.8.8.8 yes`},
		{name: "Tailscale", script: nat(`:ts-postrouting -
-A POSTROUTING -j ts-postrouting
-A ts-postrouting -m mark --mark 0x40000/0xff0000 -j MASQUERADE
`), answers: none},
		{name: "OVN-Kubernetes", script: nft(`table inet ovn-kubernetes {
	set mgmtport-no-snat-nodeports { type inet_proto . inet_service; elements = { tcp . 30080 }; }
	set no-pmtud-remote-node-ips-v4 { type ipv4_addr; elements = { 192.168.7.7 }; }
	chain mgmtport-snat {
		type nat hook postrouting priority srcnat; policy accept
		oifname != "ovn-k8s-mp0" return
		meta l4proto . th dport @mgmtport-no-snat-nodeports counter return
		counter snat ip to 10.244.0.2
	}
	chain udn-service-mark { }
}
`) + nat(`:OVN-KUBE-EGRESS-SVC -
:OVN-KUBE-EGRESS-IP-MULTI-NIC -
-A POSTROUTING -j OVN-KUBE-EGRESS-IP-MULTI-NIC
-A POSTROUTING -j OVN-KUBE-EGRESS-SVC
-A OVN-KUBE-EGRESS-IP-MULTI-NIC -s 10.244.1.0/24 -o outside -j SNAT --to-source 198.51.100.9
-A OVN-KUBE-EGRESS-SVC -m mark --mark 0x3f0 -m comment --comment DoNotSNAT -j RETURN
`), answers: none + `
			10.244.1.3 8.8.8.8 yes
			10.244.1.3 10.9.9.9 no`},
		{name: "Calico, iptables", ipsets: map[string][]string{"cali40masq-ipam-pools": {"10.244.0.0/16"}, "cali40all-ipam-pools": {"10.244.0.0/16"}},
			script: nat(`:cali-POSTROUTING -
:cali-fip-snat -
:cali-nat-outgoing -
-A POSTROUTING -m comment --comment "cali:O3lYWMrLQYEMJtB5" -j cali-POSTROUTING
-A cali-POSTROUTING -m comment --comment "cali:Z-c7XtVd2Bq7s_hA" -j cali-fip-snat
-A cali-POSTROUTING -m comment --comment "cali:nYKhEzDlr11Jccal" -j cali-nat-outgoing
-A cali-POSTROUTING -o vxlan.calico -m comment --comment "cali:e9dnSgSVNmIcpVhP" -m addrtype ! --src-type LOCAL --limit-iface-out -m addrtype --src-type LOCAL -j MASQUERADE --random-fully
-A cali-nat-outgoing -m comment --comment "cali:flqWnvo8yq4ULQLa" -m set --match-set cali40masq-ipam-pools src -m set ! --match-set cali40all-ipam-pools dst -j MASQUERADE --random-fully
`), answers: `10.244.0.2 10.9.9.9 perhaps
			172.20.0.5 10.9.9.9 perhaps`}, // ipsets are not read
		{name: "Calico, nftables", script: nft(`table ip calico {
	set cali40masq-ipam-pools { type ipv4_addr; flags interval; elements = { 10.244.0.0/16 }; }
	set cali40all-ipam-pools { type ipv4_addr; flags interval; elements = { 10.244.0.0/16, 192.168.7.0/24 }; }
	chain nat-cali-fip-snat { }
	chain nat-cali-nat-outgoing { ip saddr @cali40masq-ipam-pools ip daddr != @cali40all-ipam-pools counter masquerade fully-random; }
	chain nat-cali-POSTROUTING {
		type nat hook postrouting priority srcnat; policy accept
		counter jump nat-cali-fip-snat
		counter jump nat-cali-nat-outgoing
		oifname "vxlan.calico" fib saddr type local counter masquerade fully-random
	}
}
`), answers: `10.244.0.2 10.9.9.9 yes
			10.244.0.2 192.168.7.7 no
			172.20.0.5 10.9.9.9 no`},
		{name: "flannel, iptables", script: nat(`:FLANNEL-POSTRTG -
-A POSTROUTING -m comment --comment "flanneld masq" -j FLANNEL-POSTRTG
-A FLANNEL-POSTRTG -m mark --mark 0x4000/0x4000 -m comment --comment "flanneld masq" -j RETURN
-A FLANNEL-POSTRTG -s 10.244.0.0/24 -d 10.244.0.0/16 -m comment --comment "flanneld masq" -j RETURN
-A FLANNEL-POSTRTG -s 10.244.0.0/16 -d 10.244.0.0/24 -m comment --comment "flanneld masq" -j RETURN
-A FLANNEL-POSTRTG ! -s 10.244.0.0/16 -d 10.244.0.0/24 -m comment --comment "flanneld masq" -j RETURN
-A FLANNEL-POSTRTG -s 10.244.0.0/16 ! -d 224.0.0.0/4 -m comment --comment "flanneld masq" -j MASQUERADE --random-fully
-A FLANNEL-POSTRTG ! -s 10.244.0.0/16 -d 10.244.0.0/16 -m comment --comment "flanneld masq" -j MASQUERADE --random-fully
`), answers: `10.244.0.2 10.9.9.9 yes
			10.244.0.2 10.244.7.7 no
			172.20.0.5 10.244.7.7 yes
			172.20.0.5 10.9.9.9 no`},
		{name: "flannel, nftables", script: nft(`table ip flannel-ipv4 {
	chain postrtg {
		comment "chain to manage traffic masquerading by flannel"
		type nat hook postrouting priority srcnat; policy accept
		meta mark & 0x4000 == 0x4000 return
		ip saddr 10.244.0.0/24 ip daddr 10.244.0.0/16 return
		ip saddr 10.244.0.0/16 ip daddr 10.244.0.0/24 return
		ip saddr != 10.244.0.0/16 ip daddr 10.244.0.0/24 return
		ip saddr 10.244.0.0/16 ip daddr != 224.0.0.0/4 masquerade fully-random
		ip saddr != 10.244.0.0/16 ip daddr 10.244.0.0/16 masquerade fully-random
	}
}
`), answers: `10.244.0.2 10.9.9.9 yes
			10.244.0.2 10.244.7.7 no
			172.20.0.5 10.244.7.7 yes`},
		{name: "Cilium's iptables part", script: nat(`:CILIUM_POST_nat -
-A POSTROUTING -m comment --comment "cilium-feeder: CILIUM_POST_nat" -j CILIUM_POST_nat
-A CILIUM_POST_nat -m mark --mark 0xa00/0xe00 -m comment --comment "exclude proxy return traffic from masquerade" -j ACCEPT
-A CILIUM_POST_nat -s 10.244.0.0/24 ! -d 10.244.0.0/16 ! -o cilium_+ -m comment --comment "cilium masquerade non-cluster" -j MASQUERADE
-A CILIUM_POST_nat ! -s 10.244.0.0/24 ! -d 10.244.0.0/24 -o cilium_host -m comment --comment "cilium host->cluster masquerade" -j SNAT --to-source 10.244.0.1
-A CILIUM_POST_nat -s 127.0.0.1/32 -o cilium_host -m comment --comment "cilium host->cluster from 127.0.0.1 masquerade" -j SNAT --to-source 10.244.0.1
`) + mangle(`:CILIUM_POST_mangle -
-A POSTROUTING -m comment --comment "cilium-feeder: CILIUM_POST_mangle" -j CILIUM_POST_mangle
`), answers: `10.244.0.2 10.9.9.9 yes
			10.244.0.2 10.244.7.7 no
			172.20.0.5 10.9.9.9 no`},
		{name: "kube-router", ipsets: map[string][]string{"kube-router-pod-subnets": {"10.244.0.0/16"}, "kube-router-node-ips": {"192.168.50.0/24"}},
			script: nat(`-A POSTROUTING -m set --match-set kube-router-pod-subnets src -m set ! --match-set kube-router-pod-subnets dst -m set ! --match-set kube-router-node-ips dst -j MASQUERADE --random-fully
`), answers: `10.244.0.2 10.9.9.9 perhaps
			172.20.0.5 10.9.9.9 perhaps`}, // ipsets are not read
		{name: "Weave", ipsets: map[string][]string{"weaver-no-masq-local": {"192.168.7.0/24"}},
			script: nat(`:WEAVE -
-A POSTROUTING -j WEAVE
-A WEAVE -m set --match-set weaver-no-masq-local dst -m comment --comment "Prevent SNAT to locally running containers" -j RETURN
-A WEAVE -s 10.244.0.0/16 -d 224.0.0.0/4 -j RETURN
-A WEAVE ! -s 10.244.0.0/16 -d 10.244.0.0/16 -j MASQUERADE
-A WEAVE -s 10.244.0.0/16 ! -d 10.244.0.0/16 -j MASQUERADE
`), answers: `10.244.0.2 10.9.9.9 perhaps
			172.20.0.5 10.9.9.9 no`},
		{name: "AWS VPC CNI", script: nat(`:AWS-SNAT-CHAIN-0 -
-A POSTROUTING -m comment --comment "AWS SNAT CHAIN" -j AWS-SNAT-CHAIN-0
-A AWS-SNAT-CHAIN-0 -d 10.0.0.0/8 -m comment --comment "AWS SNAT CHAIN" -j RETURN
-A AWS-SNAT-CHAIN-0 ! -o vlan+ -m comment --comment "AWS, SNAT" -m addrtype ! --dst-type LOCAL -j SNAT --to-source 198.51.100.1 --random-fully
`) + mangle(`-A PREROUTING -i eni+ -m comment --comment "AWS, primary ENI" -j CONNMARK --restore-mark --nfmask 0x80 --ctmask 0x80
`), answers: `10.244.0.2 10.9.9.9 no
			10.244.0.2 192.168.7.7 yes
			10.244.0.2 8.8.8.8 yes`},
		{name: "wg-quick", script: nft(`table ip wg-quick-wg0 {
	chain preraw { type filter hook prerouting priority raw; policy accept; iifname != "wg0" ip daddr 10.66.0.2 fib saddr type != local drop; }
	chain premangle { type filter hook prerouting priority mangle; policy accept; meta l4proto udp meta mark set ct mark; }
	chain postmangle { type filter hook postrouting priority mangle; policy accept; meta l4proto udp meta mark 0xca6c ct mark set meta mark; }
}
`) + nat("-A POSTROUTING -o wg0 -j MASQUERADE\n"), answers: none},
	}
}

// TestProgramRulesets loads rules in the forms of programs, and holds the answers to what packets show.
func TestProgramRulesets(t *testing.T) {
	t.Parallel()
	l := newRulesetLab(t)
	for _, p := range programRulesets() {
		t.Run(p.name, func(t *testing.T) {
			must(t, l.Node.Do(func() error { return createIPSets(p.ipsets) }))
			l.load(t, p.script)
			judge := l.judge(t)
			for line := range strings.Lines(p.answers) {
				fields := strings.Fields(line)
				from, to, want := netip.MustParseAddr(fields[0]), netip.MustParseAddr(fields[1]), fields[2]
				v := judge(from, to, outOf(to))
				for transport, send := range transports() {
					seen, err := send(l.podWith(from), netip.AddrPortFrom(to, topology.EchoPort))
					must(t, err)
					is, translated := agreesWith(v, from, l.nodeAddr(to), seen.Source.Addr())
					got := map[thirdparty.Answer]string{thirdparty.Yes: "yes", thirdparty.No: "no", thirdparty.Perhaps: "perhaps"}[translated]
					if got != want || !is {
						t.Errorf("%s: %s is seen from %s, and the answer is %s, %s", strings.TrimSpace(line), transport, seen.Source.Addr(), got, answerText(v))
					}
				}
			}
		})
	}
}

func (l *rulesetLab) podWith(address netip.Addr) *topology.Host {
	for _, pod := range l.pods {
		if pod.Addrs[0] == address {
			return pod
		}
	}
	return nil
}

func createIPSets(sets map[string][]string) error {
	for name, elements := range sets {
		if err := netlink.IpsetCreate(name, "hash:net", netlink.IpsetCreateOptions{}); err != nil {
			return err
		}
		for _, element := range elements {
			prefix := netip.MustParsePrefix(element)
			if err := netlink.IpsetAdd(name, &netlink.IPSetEntry{IP: prefix.Addr().AsSlice(), CIDR: uint8(prefix.Bits())}); err != nil {
				return err
			}
		}
	}
	return nil
}
