// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"maps"
	"path/filepath"
	"strings"
	"testing"
)

// TestLackingKernel runs ADD, STATUS and the reconciler on kernels that lack a part. It checks that what
// can work does, and that the errors name the part and the remedy.
func TestLackingKernel(t *testing.T) {
	t.Parallel()
	xt := []string{"addrtype", "comment", "statistic", "MASQUERADE"}
	noTables := []string{"backend unusable", "the kernel needs nf_tables", "try: modprobe nf_tables"}
	noExpressions := []string{"CONFIG_NFT_NAT, CONFIG_NFT_MASQ, CONFIG_NFT_FIB_IPV4 and", "try: modprobe -a nft_chain_nat nft_masq nft_fib_ipv4", "nft_nat", "or set backend to iptables"}
	denied := missing{denied: []string{"/run/xtables.lock"}}
	both := object{"enableIPv6": true}
	for _, c := range []struct {
		name    string
		lacks   missing
		backend string
		keys    object
		says    []string // by STATUS, ADD and the reconciler; nil: they succeed
	}{
		{"nf_tables", missing{nfTables: true}, "nftables", nil, noTables},
		{"nf_tables", missing{nfTables: true}, "iptables-nft", nil, []string{"modprobe -a nft_chain_nat nft_compat", "set backend to nftables"}},
		{"nf_tables", missing{nfTables: true}, "iptables-legacy", nil, nil},
		{"nfnetlink", missing{nfnetlink: true}, "nftables", nil, noTables},
		{"nfnetlink", missing{nfnetlink: true}, "iptables-nft", nil, []string{"modprobe -a nft_chain_nat nft_compat", "set backend to nftables"}},
		{"nfnetlink", missing{nfnetlink: true}, "iptables-legacy", nil, nil},
		{"nft_fib", missing{names: []string{"fib"}}, "nftables", nil, noExpressions},
		{"nft_fib", missing{names: []string{"fib"}}, "iptables-nft", nil, nil},
		{"nft_masq", missing{names: []string{"masq"}}, "nftables", nil, noExpressions},
		{"nft_chain_nat", missing{names: []string{"nat"}}, "nftables", nil, noExpressions},
		{"nft_chain_nat", missing{names: []string{"nat"}}, "iptables-nft", nil, []string{"modprobe -a nft_chain_nat"}},
		{"nft_chain_nat", missing{names: []string{"nat"}}, "iptables-legacy", nil, nil},
		{"xt", missing{names: xt}, "nftables", nil, nil},
		{"xt", missing{names: xt}, "iptables-nft", nil, []string{"xt_addrtype", "set backend to nftables"}},
		{"ip_tables", missing{xtables: true}, "iptables-nft", nil, nil},
		{"ip_tables", missing{xtables: true}, "iptables-legacy", nil, []string{"iptable_nat", "set backend to nftables"}},
		{"IPv6", missing{inet6: true}, "nftables", nil, nil},
		{"IPv6", missing{inet6: true}, "iptables-nft", nil, nil},
		{"IPv6", missing{inet6: true}, "iptables-legacy", nil, nil},
		{"IPv6, enabled", missing{inet6: true}, "nftables", both, nil},
		{"IPv6, enabled", missing{inet6: true}, "iptables-nft", both, nil},
		{"IPv6, enabled", missing{inet6: true}, "iptables-legacy", both, []string{"unable to initialize table 'nat'", "set backend to nftables"}},
		{"xtables.lock by SELinux", denied, "iptables-legacy", nil, []string{"/run/xtables.lock: Permission denied"}},
		{"xtables.lock by SELinux", denied, "nftables", nil, nil},
	} {
		for _, b := range backends() {
			if b.name != c.backend {
				continue
			}
			t.Run(c.name+", "+b.name, func(t *testing.T) {
				n := newNode(t, b)
				n.lacks(t, c.lacks)
				keys := object{"nonMasqueradeCIDRs": []string{"10.0.0.0/8"}}
				maps.Copy(keys, c.keys)
				conf := n.conf(t, "podnet", keys)
				if c.says == nil {
					n.addAndCheck(t, conf).noWarnings(t)
					n.invoke(t, invocation{verb: "STATUS", conf: conf}).want(t, 0)
					n.wantSays(t, 0, nil, "once")
					return
				}
				n.invoke(t, invocation{verb: "STATUS", conf: conf}).want(t, 50, c.says...)
				for range 2 {
					a := n.invoke(t, invocation{verb: "ADD", conf: conf}).want(t, 100, c.says...)
					if strings.Count(a.msg, "the kernel needs") > 1 || strings.Count(a.msg, "backend unusable") > 1 {
						t.Errorf("the message says it twice: %s", a.msg)
					}
				}
				n.invoke(t, invocation{verb: "DEL", conf: conf}).want(t, 0)
				n.conflist(t, "podnet", keys)
				n.wantSays(t, 1, c.says, "once")
				n.wantSays(t, 0, c.says, "doctor")
			})
		}
	}
}

// TestAutoOnLackingKernel checks which backend auto chooses where the program called iptables is of a variant
// without a side in the kernel.
func TestAutoOnLackingKernel(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		lacks missing
		plain string // the variant of the program called iptables; the other one is installed, too
		want  string
	}{
		"no nf_tables": {missing{nfTables: true}, "nft", "iptables legacy"},
		"RHEL 10":      {missing{xtables: true}, "legacy", "nftables"},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, backends()[0])
			n.path = n.linkBothVariants(t, c.plain)
			n.lacks(t, c.lacks)
			conf := n.conf(t, "podnet", object{"backend": "auto"})
			for range 2 {
				n.invoke(t, invocation{verb: "STATUS", conf: conf}).want(t, 0)
				n.addAndCheck(t, conf)
				n.wantOwnedChains(t, "IP-MASQ-AGENT ipv4 "+c.want)
			}
		})
	}
}

// TestDeniedDirectories checks what the programs say of directories that root is not allowed to open, as by
// SELinux.
func TestDeniedDirectories(t *testing.T) {
	t.Parallel()
	says := []string{"permission denied to root", "SELinux", "ausearch -m avc"}
	t.Run("dataDir", func(t *testing.T) {
		n := newNode(t, backends()[0])
		conf := n.conf(t, "podnet", nil)
		n.addAndCheck(t, conf)
		n.lacks(t, missing{denied: []string{n.dataDir}})
		n.invoke(t, invocation{verb: "STATUS", conf: conf}).want(t, 50, says...)
		n.invoke(t, invocation{verb: "ADD", conf: conf}).want(t, 11, says...)
		n.invoke(t, invocation{verb: "CHECK", conf: conf}).want(t, 101, says...)
		if d := n.invoke(t, invocation{verb: "DEL", conf: conf}).want(t, 0); !strings.Contains(d.stderr, "SELinux") {
			t.Errorf("DEL does not warn: %s", d.stderr)
		}
		n.wantSays(t, 1, says, "once")
	})
	t.Run("conflists", func(t *testing.T) {
		n := newNode(t, backends()[0])
		n.conflist(t, "podnet", nil)
		n.lacks(t, missing{denied: []string{filepath.Join(n.dir, "net.d")}})
		n.wantSays(t, 1, says, "once")
	})
}

// wantSays runs a command of the reconciler, and checks its exit code and output. It returns the standard output.
func (n *node) wantSays(t *testing.T, want int, says []string, args ...string) (stdout string) {
	t.Helper()
	stdout, stderr, code := n.reconciler(t, args...)
	if code != want {
		t.Errorf("%s: exit code %d, want %d\n%s%s", args[0], code, want, stdout, stderr)
	}
	wantText(t, args[0], stdout+stderr, says...)
	return stdout
}

// TestModulesDisabled checks that no error recommends modprobe on a node that forbids to load modules.
func TestModulesDisabled(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		backend int
		lacks   missing
		part    string
	}{
		{0, missing{names: []string{"masq"}}, "CONFIG_NFT_MASQ"},
		{0, missing{nfnetlink: true}, "CONFIG_NF_TABLES"},
		{1, missing{names: []string{"addrtype"}}, "xt_addrtype"},
		{2, missing{xtables: true}, "iptable_nat"},
	} {
		b := backends()[c.backend]
		t.Run(b.name+", "+c.part, func(t *testing.T) {
			n := newNode(t, b)
			n.lacks(t, c.lacks)
			// A kernel that is built without modules does not have the file, so the directory is replaced.
			n.sysctls(t, "/proc/sys/kernel", []string{"random"}, map[string]string{"modules_disabled": "1\n"})
			a := n.invoke(t, invocation{verb: "ADD", conf: n.conf(t, "podnet", nil)}).want(t, 100, c.part, "kernel.modules_disabled", "/etc/modules-load.d", "reboot")
			if strings.Contains(a.msg, "modprobe") {
				t.Errorf("the message recommends modprobe: %s", a.msg)
			}
		})
	}
}

// TestGuardOnLackingKernel checks that a guard that the kernel cannot have fails no ADD, is no difference
// for CHECK, and that the ADD and `status` name what is missing.
func TestGuardOnLackingKernel(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		lacks    missing
		backends []backend
		modprobe string
	}{
		"nft_fib":   {missing{names: []string{"fib"}}, backends()[1:], "nft_nat"},
		"nft_ct":    {missing{names: []string{"ct"}}, backends(), "nft_nat"},
		"nf_tables": {missing{nfTables: true}, backends()[2:], "nf_tables"},
	} {
		for _, b := range c.backends {
			t.Run(name+", "+b.name, func(t *testing.T) {
				n := newNode(t, b)
				n.lacks(t, c.lacks)
				conf := n.conf(t, "podnet", object{"guard": "drop", "enforceExempt": true, "podCIDRs": []string{"10.1.0.0/16"}})
				const has = "guard, enforceExempt without effect"
				n.invoke(t, invocation{verb: "ADD", conf: conf}).want(t, 0, has, "CONFIG_NF", "modprobe", c.modprobe)
				for range 2 {
					n.invoke(t, invocation{verb: "CHECK", conf: conf}).want(t, 0)
					n.invoke(t, invocation{verb: "STATUS", conf: conf}).want(t, 0)
					n.invoke(t, invocation{verb: "ADD", conf: conf}).want(t, 0)
				}
				n.wantSays(t, 0, []string{has}, "once")
				n.wantSays(t, 1, []string{"not ready: no reconciler runs", "guard-inactive"}, "status") // 1: no reconciler runs
				n.wantSays(t, 0, []string{"guard-inactive", "CONFIG_NF"}, "doctor")
				n.wantSays(t, 0, nil, "check")
			})
		}
	}
}

// TestRootless runs the plugin as root of a user namespace that does not own the node's network namespace,
// as in a container without privileges.
func TestRootless(t *testing.T) {
	onEveryBackend(t, func(t *testing.T, n *node) {
		conf := n.conf(t, "podnet", nil)
		unprivileged := func(verb string) result {
			return n.invoke(t, invocation{verb: verb, conf: conf, unprivileged: true})
		}
		says := []string{"operation not permitted", "CAP_NET_ADMIN over the network namespace"}
		unprivileged("STATUS").want(t, 50, says...)
		unprivileged("ADD").want(t, 100, says...)
		unprivileged("DEL").want(t, 0)
		n.addAndCheck(t, conf) // with privileges
		unprivileged("CHECK").want(t, 101, says...)
	})
}

// TestReconcilerOnLackingKernel checks that a reconciler that runs is not ready for reason backend, and that
// the probe and `status` name what is missing.
func TestReconcilerOnLackingKernel(t *testing.T) {
	t.Parallel()
	n := newNode(t, backends()[0])
	n.lacks(t, missing{names: []string{"masq"}})
	n.agentFile(t, "ip-masq.yaml", "nonMasqueradeCIDRs: [10.0.0.0/8]\n")
	d := n.startReconciler(t)
	d.untilUnready(t, "backend", "CONFIG_NFT_MASQ", "modprobe -a nft_chain_nat nft_masq")
	n.wantSays(t, 3, []string{"backend:", "CONFIG_NFT_MASQ"}, "status")
}

// TestReconcilerWithoutIPv6 checks that a reconciler repairs the rules of IPv4 on a kernel without IPv6.
func TestReconcilerWithoutIPv6(t *testing.T) {
	onEveryBackend(t, func(t *testing.T, n *node) {
		n.lacks(t, missing{inet6: true})
		n.conflist(t, "podnet", object{"guard": "drop", "podCIDRs": []string{"10.1.0.0/16"}})
		d := n.startReconciler(t, "--resync-interval", "1s").untilReady(t)
		right := n.ruleset(t)
		n.flushMasqChain(t)
		d.until(t, "repair", func() bool { return n.ruleset(t) == right })
		n.wantSays(t, 0, []string{"no problems"}, "status")
	})
}
