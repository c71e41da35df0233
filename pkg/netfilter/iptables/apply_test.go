// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/policytest"
	"github.com/ip-masq/ip-masq-cni/e2e/timelimit"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// policyGen draws a policy with every key, whose prefixes are near enough to each other to nest.
func policyGen(chain string) *rapid.Generator[policy.Policy] {
	from := policytest.Any()
	from.Chain = rapid.Just(chain)
	from.Interface = rapid.StringMatching(`[a-zA-Z0-9_.@#$%&()=,;'-]{1,14}[a-z+]`)
	from.Prefix = func(f policy.Family) *rapid.Generator[netip.Prefix] {
		return rapid.Custom(func(t *rapid.T) netip.Prefix {
			a := netip.AddrFrom4([4]byte{rapid.SampledFrom([]byte{10, 169, 224, 0}).Draw(t, "first"), rapid.Byte().Draw(t, "second"), 0,
				rapid.Byte().Draw(t, "last")})
			if f == policy.IPv6 {
				b := [16]byte{0: 0xfd, 15: 1}
				for i := range 3 {
					b[rapid.IntRange(1, 15).Draw(t, "at")] = rapid.Byte().Draw(t, fmt.Sprint("byte", i))
				}
				a = netip.AddrFrom16(b)
			}
			return netip.PrefixFrom(a, rapid.IntRange(0, a.BitLen()).Draw(t, "length")).Masked()
		})
	}
	return rapid.Custom(func(t *rapid.T) policy.Policy {
		return policytest.ChooseOutputs(policy.Merge([]policy.Source{{Policy: from.SourcePolicy(t)}}))[0]
	})
}

// TestApply compares what is written with what is desired, whatever rules there were
// before, and what is read with what iptables shows.
func TestApply(t *testing.T) {
	inEachVariant(t, func(n *node) {
		rapid.Check(n.T, func(t *rapid.T) {
			want := desired(policy.OwnedBy(owner), policyGen("ONE").Draw(t, "one"), policyGen("TWO").Draw(t, "two"))
			n.apply(want)
			n.holds(want)
			n.agreesWithListing("ONE", "TWO")
			n.idle("a second Apply", func() { n.apply(want) })
			for _, c := range want.Chains {
				for _, j := range c.Jumps {
					checkModules(t, n.choice.Variant, ruleCommand(j, postrouting, c.Name, ""))
				}
				for _, r := range c.Rules {
					checkModules(t, n.choice.Variant, ruleCommand(r, c.Name, "", ""))
				}
			}
		})
	})
}

// checkModules checks that an error names the modules that a rule needs.
func checkModules(t *rapid.T, variant, rule string) {
	remedy := needs(variant)
	for _, m := range regexp.MustCompile(`-(?:m|j) (\w+)`).FindAllStringSubmatch(rule, -1) {
		module := "xt_" + m[1]
		switch m[1] {
		case "RETURN", "ONE", "TWO":
			continue
		case "SNAT":
			module = "xt_nat"
		}
		if !regexp.MustCompile(`\b` + module + `\b`).MatchString(remedy) {
			t.Fatalf("it does not name %s: %s", module, remedy)
		}
	}
}

// TestApplyWritesOnlyWhatDiffers looks at the text given to iptables-restore.
func TestApplyWritesOnlyWhatDiffers(t *testing.T) {
	inEachVariant(t, func(n *node) {
		const chain = "IP-MASQ-AGENT"
		want := desired(policy.OwnedBy(owner), basic(chain))
		want.Chains = want.Chains[:1]
		n.apply(want)
		plan := func() string {
			tx := assert.Must(n.plan(n.Context(), policy.IPv4, want.Chains, false))(n)
			return string(tx.restore())
		}
		jump := "-A POSTROUTING -m comment --comment \"" + agentJumpComment(chain) + "\" -m addrtype ! --dst-type LOCAL -j " + chain + "\n"
		n.iptables(policy.IPv4, "-D POSTROUTING 1")
		assert.Equal(n, "jump missing", plan(), "*nat\n"+jump+"COMMIT\n")
		n.apply(want)
		n.iptables(policy.IPv4, "-D "+chain+" 2")
		if got := plan(); strings.Contains(got, "POSTROUTING") || !strings.Contains(got, ":"+chain+" - [0:0]\n") {
			n.Errorf("rule missing: %s", got)
		}
		n.apply(want)
		// Of three jumps that do the same the last stays, whatever its comment.
		n.load(policy.IPv4, strings.TrimSpace(jump), `-A POSTROUTING -m comment --comment "an agent's" -m addrtype ! --dst-type LOCAL -j `+chain)
		assert.Equal(n, "jump thrice", plan(), "*nat\n"+strings.Repeat(strings.Replace(jump, "-A", "-D", 1), 2)+"COMMIT\n")
		n.apply(want)
		n.holds(want)
		if got := n.save(policy.IPv4); !strings.Contains(got, "an agent") || strings.Contains(got, agentJumpComment(chain)) {
			n.Errorf("the wrong one was deleted:\n%s", got)
		}
		// Another owner alone is a reason to write.
		other := desired(policy.OwnedBy("/elsewhere"), basic(chain))
		n.apply(other)
		n.holds(other)
	})
}

func TestRemove(t *testing.T) {
	inEachVariant(t, func(n *node) {
		before := map[policy.Family]string{}
		for _, f := range policy.Families() {
			n.load(f, ":OTHER -", "-A POSTROUTING -p udp -j OTHER", "-A OTHER -j RETURN")
			before[f] = n.save(f)
		}
		scoped := basic("TWO")
		scoped.Sources.Value = prefixList("10.0.0.0/8", "fd00::/8")
		scoped.Interfaces.Value = []string{"eth0", "wl+"}
		n.apply(desired(policy.OwnedBy(owner), basic("ONE"), scoped))
		for _, f := range policy.Families() {
			n.load(f, "-A ONE -p icmp -j ACCEPT", "-A TWO -j ONE",
				`-A POSTROUTING -m mark --mark 0x1/0x2 -m comment --comment "\"odd\" it's" -j ONE`, "-A POSTROUTING -g TWO", "-A POSTROUTING -j ONE")
		}
		all := bothFamilies("ONE", "TWO", "NEVER-THERE")
		assert.NoError(n, n.Remove(n.Context(), all, nil))
		for _, f := range policy.Families() {
			assert.Equal(n, fmt.Sprintf("%s: not as before", f), n.save(f), before[f])
		}
		n.idle("Remove of what is not there", func() {
			assert.NoError(n, n.Remove(n.Context(), all, nil))
		})
	})
}

// TestRemoveUsedChain: another chain leads to it.
func TestRemoveUsedChain(t *testing.T) {
	inEachVariant(t, func(n *node) {
		n.apply(desired(policy.OwnedBy(owner), basic("ONE")))
		n.load(policy.IPv4, ":OTHER -", "-A OTHER -p udp -j ONE")
		before := n.save(policy.IPv4)
		if err := n.Remove(n.Context(), bothFamilies("ONE"), nil); err == nil {
			n.Error("it was removed")
		}
		assert.Equal(n, "half removed", n.save(policy.IPv4), before)
		if got := n.save(policy.IPv6); strings.Contains(got, "ONE") {
			n.Errorf("the failure of one family kept the other:\n%s", got)
		}
	})
}

// TestDeleteRefusesLineFeeds deletes a jump whose comment iptables-restore would
// read as a second command.
func TestDeleteRefusesLineFeeds(t *testing.T) {
	inEachVariant(t, func(n *node) {
		want := desired(policy.OwnedBy(owner), basic("X"))
		n.apply(want)
		out, err := n.command(policy.IPv4, "", "", "-t", "nat", "-A", "POSTROUTING", "-m", "comment", "--comment", "a\n-F OTHER", "-j", "X")
		if err != nil {
			n.Fatal(err, out)
		}
		before := n.save(policy.IPv4)
		for what, err := range map[string]error{"Apply": n.Apply(n.Context(), want, netfilter.Observation{}, nil), "Remove": n.Remove(n.Context(), refs(want), nil)} {
			if err == nil || !strings.Contains(err.Error(), "with iptables -D") {
				n.Errorf("%s: %v", what, err)
			}
		}
		assert.Equal(n, "something was written", n.save(policy.IPv4), before)
	})
}

// failing makes iptables-restore fail the given number of times. It returns the number
// of its calls.
func (n *node) failing(times int, err error) (calls *int) {
	calls = new(int)
	n.beforeRestore(func() error {
		if *calls++; *calls <= times {
			return err
		}
		return nil
	})
	return calls
}

// TestApplyJumpsOfOneAddress: ip6tables-nft 1.8.9 deletes the first rule with the address, whatever its prefix
// length.
func TestApplyJumpsOfOneAddress(t *testing.T) {
	inEachVariant(t, func(n *node) {
		scoped := func(cidrs ...string) policy.Ruleset {
			p := basic("ONE")
			p.Sources.Value = prefixList(cidrs...)
			return desired(policy.OwnedBy(owner), p)
		}
		for _, want := range []policy.Ruleset{scoped("fd00::/13", "fd00::/19", "fd00::/32"), scoped("fd00::/13", "fd00::/32"), scoped("fd00::/19", "fd00::/32")} {
			n.apply(want)
			n.holds(want)
		}
	})
}

func TestApplyTriesAgain(t *testing.T) {
	want := desired(policy.OwnedBy(owner), basic("X"))
	want.Chains = want.Chains[:1]
	failure := errors.New("exit status 4")
	for _, tc := range []struct {
		name  string
		times int
		calls int
	}{
		{name: "another program writes too", times: 3, calls: 4},
		{name: "always", times: 1000, calls: 6},
	} {
		t.Run(tc.name, func(t *testing.T) {
			n := newNode(t, netfilter.VariantNFT)
			calls := n.failing(tc.times, failure)
			err := n.Apply(n.Context(), want, netfilter.Observation{}, nil)
			if *calls != tc.calls || errors.Is(err, failure) != (tc.times >= tc.calls) {
				n.Errorf("%d calls, %v", *calls, err)
			}
		})
	}
	t.Run("another plan", func(t *testing.T) {
		n := newNode(t, netfilter.VariantNFT)
		n.apply(want)
		n.load(policy.IPv4, "-A POSTROUTING -j X")
		calls := n.failing(0, nil)
		n.beforeRestore(func() error {
			if *calls == 0 { // another program deletes the jump
				n.iptables(policy.IPv4, "-D POSTROUTING -j X")
				n.iptables(policy.IPv4, "-A POSTROUTING -p tcp -j X")
			}
			return nil
		})
		n.apply(want)
		n.holds(want)
		assert.Equal(n, "calls", *calls, 2)
	})
}

// TestLockHeld holds the lock of iptables-legacy.
func TestLockHeld(t *testing.T) {
	n := newNode(t, netfilter.VariantLegacy)
	f, err := os.OpenFile("/run/xtables.lock", os.O_CREATE|os.O_RDWR, 0o600)
	assert.NoError(t, err)
	defer f.Close()
	assert.NoError(t, unix.Flock(int(f.Fd()), unix.LOCK_EX))
	want := desired(policy.OwnedBy(owner), basic("X"))
	want.Chains = want.Chains[:1]
	start := time.Now()
	err = n.Apply(n.Context(), want, netfilter.Observation{}, nil)
	if took := time.Since(start); err == nil || !strings.Contains(err.Error(), "/run/xtables.lock") || !errors.Is(err, netfilter.ErrBusy) || errors.Is(err, netfilter.ErrUnusable) || timelimit.Exceeded(took, 8*time.Second) {
		t.Errorf("after %v: %v", took, err)
	}
	// Reading takes no lock.
	start = time.Now()
	n.observe(refs(want))
	if took := time.Since(start); timelimit.Exceeded(took, 4*time.Second) {
		t.Errorf("reading took %v", took)
	}
}

// countingReader counts the readings of the rules.
type countingReader struct {
	reader
	readings *int
}

func (r countingReader) read(f policy.Family, names []string) (table, error) {
	*r.readings++
	return r.reader.read(f, names)
}

// TestObstacleIsReportedAtOnce: what stays wrong until somebody mends it is not tried again, which would keep an ADD
// and those behind it for 155 ms.
func TestObstacleIsReportedAtOnce(t *testing.T) {
	inEachVariant(t, func(n *node) {
		want := desired(policy.OwnedBy(owner), basic("IP-MASQ-AGENT"))
		n.load(policy.IPv4, ":IP-MASQ-AGENT -", "-A PREROUTING -j IP-MASQ-AGENT")
		readings := 0
		n.reader = countingReader{n.reader, &readings}
		err := n.Apply(n.Context(), policy.Ruleset{Chains: netfilter.ChainsOf(want, policy.IPv4)}, netfilter.Observation{}, nil)
		assert.ErrorContains(n, err, "has a jump to chain IP-MASQ-AGENT", "remove the jump")
		assert.Equal(n, "readings", readings, 1)
		assert.Equal(n, "runs of iptables-restore", n.writes, 0)
	})
}
