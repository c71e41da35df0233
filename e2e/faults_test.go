// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// TestDiskFull leaves 0 to 5 pages free on the file system of the dataDir. It checks that an ADD whose state cannot be
// written answers 11, names the file and the cause, and changes neither rules nor documents, and that STATUS passes.
func TestDiskFull(t *testing.T) {
	onEveryBackend(t, func(t *testing.T, n *node) {
		const page = 4096
		disk := filepath.Join(n.dir, "disk")
		n.dataDir = filepath.Join(disk, "data")
		must(t, os.Mkdir(disk, 0o700))
		must(t, syscall.Mount("full", disk, "tmpfs", 0, fmt.Sprintf("size=%d,mode=0700", 16*page)))
		t.Cleanup(func() { must(t, syscall.Unmount(disk, syscall.MNT_DETACH)) })
		ballast := filepath.Join(disk, "ballast")
		fillDisk(t, disk, 0)
		first := n.conf(t, "podnet", nil)
		before := n.ruleset(t)
		fails := func(conf, id string) {
			t.Helper()
			n.invoke(t, invocation{verb: "ADD", conf: conf, id: id}).
				want(t, 11, n.dataDir, "no space left on device", "free space or inodes on its file system")
			n.invoke(t, invocation{verb: "STATUS", conf: conf, noNetns: true}).want(t, 0)
		}
		fails(first, "first")
		if after := n.ruleset(t); n.backend.variant != "legacy" && after != before { // iptables-legacy creates an empty table when it is read
			t.Errorf("rules changed:\n%s", after)
		}
		must(t, os.Remove(ballast))
		n.addAndCheck(t, first)
		failures := 0
		for free := range int64(6) {
			fillDisk(t, disk, free*page)
			rules, documents := n.ruleset(t), n.documentStamps(t)
			unchanged := func(of string) {
				t.Helper()
				wantSame(t, fmt.Sprintf("%s: rules with %d pages free", of, free), n.ruleset(t), rules)
				wantSame(t, fmt.Sprintf("%s: documents with %d pages free", of, free), n.documentStamps(t), documents)
			}
			// This ADD finds correct rules. It needs space only for the record of its pod.
			other := n.conf(t, "podnet", object{"prevResult": resultWith(fmt.Sprintf("10.1.0.%d/16", 100+free))})
			if free == 0 {
				fails(other, "other")
				fails(n.conf(t, "podnet", object{"masqLinkLocal": false}), "same") // another document, and the same rules
				unchanged("the record of a pod")
			} else {
				n.invoke(t, invocation{verb: "ADD", conf: other, id: fmt.Sprint("pod", free)}).want(t, 0).noWarnings(t)
			}
			second := n.conf(t, "podnet", object{"enableIPv6": true, "masqChain": "SECOND", "nonMasqueradeCIDRs": []string{"192.0.2.0/24"}})
			a := n.invoke(t, invocation{verb: "ADD", conf: second, id: "second"})
			if a.code == 0 {
				n.invoke(t, invocation{verb: "CHECK", conf: second, id: "second"}).want(t, 0)
			} else {
				failures++
				a.want(t, 11, n.dataDir, "no space left on device")
				unchanged("a document")
				n.invoke(t, invocation{verb: "STATUS", conf: second, noNetns: true}).want(t, 0)
				n.invoke(t, invocation{verb: "CHECK", conf: first}).want(t, 0)
				n.flush(t)
				n.invoke(t, invocation{verb: "DEL", conf: second, id: "second"}).want(t, 0)
				n.invoke(t, invocation{verb: "CHECK", conf: first}).want(t, 0)
			}
			must(t, os.Remove(ballast))
			n.addAndCheck(t, first)
			n.wantJumps(t, "IP-MASQ-AGENT", 1, 0)
			n.wantJumps(t, "SECOND", 0, 0)
			if unknown := n.unknownFiles(t); len(unknown) > 0 {
				t.Errorf("%d pages free: unexpected files: %q", free, unknown)
			}
		}
		if failures == 0 || failures == 6 {
			t.Errorf("%d of 6 ADDs failed for lack of space, want some", failures)
		}
	})
}

// TestLeftovers kills an ADD between its two nftables transactions. The record then lists the
// chain, the network has no document yet, and no rule references the sets. The test checks that
// DEL, once and cleanup remove what that ADD left in the ip-masq tables.
func TestLeftovers(t *testing.T) {
	t.Parallel()
	del := func(t *testing.T, n *node) {
		t.Helper()
		n.invoke(t, invocation{verb: "DEL", conf: n.conf(t, "podnet", dualStack(nil))}).want(t, 0).noWarnings(t)
	}
	const unhook = "flush table FAM ip-masq; delete chain FAM ip-masq postrouting; delete chain FAM ip-masq masq-IP-MASQ-AGENT"
	for name, c := range map[string]struct {
		nft    string
		remove func(*testing.T, *node)
	}{
		"DEL":                  {unhook, del},
		"DEL, an empty table":  {unhook + "; delete set FAM ip-masq exempt-IP-MASQ-AGENT", del},
		"once":                 {unhook, func(t *testing.T, n *node) { n.reconcileOnce(t) }},
		"once, an empty table": {unhook + "; delete set FAM ip-masq exempt-IP-MASQ-AGENT", func(t *testing.T, n *node) { n.reconcileOnce(t) }},
		"cleanup":              {unhook, func(t *testing.T, n *node) { n.cleanup(t) }},
		"cleanup without a record": {unhook, func(t *testing.T, n *node) {
			must(t, os.RemoveAll(n.dataDir))
			n.cleanup(t)
		}},
		"ADD of another network": {unhook, func(t *testing.T, n *node) {
			n.addAndCheck(t, n.conf(t, "othernet", object{"masqChain": "OTHER"}))
			n.cleanup(t)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, backends()[0])
			before := n.ruleset(t)
			n.addAndCheck(t, n.conf(t, "podnet", dualStack(nil)))
			must(t, os.Remove(n.document(t, "podnet")))
			for _, family := range families() {
				n.feed(t, strings.ReplaceAll(c.nft, "FAM", family[1])+"\n", "nft", "-f", "-")
			}
			c.remove(t, n)
			wantSame(t, "rules", n.ruleset(t), before)
		})
	}
}

// failRuleWrites puts programs into the node's PATH that list rules but fail to write them, with
// the messages of a host whose kernel lacks a module.
func (n *node) failRuleWrites(t *testing.T, programs ...string) {
	t.Helper()
	const script = "#!/bin/sh\n" +
		"echo 'Warning: Extension addrtype revision 0 not supported, missing kernel module?' >&2\n" +
		"echo \"$0: line 4: RULE_APPEND failed (No such file or directory)\" >&2\nexit 1\n"
	for _, program := range programs {
		path := filepath.Join(n.path, program)
		if err := os.Remove(path); err != nil && !os.IsNotExist(err) {
			t.Fatal(err)
		}
		must(t, os.WriteFile(path, []byte(script), 0o755))
	}
}

// TestOneFamilyFails checks that ADD fails if one family cannot be written, and that neither
// family's rules nor the document change where rules are in force.
func TestOneFamilyFails(t *testing.T) {
	onBackends(t, backends()[1:], func(t *testing.T, n *node) {
		n.addThirdPartyRules(t)
		first := n.conf(t, "podnet", object{"nonMasqueradeCIDRs": []string{"10.0.0.0/8"}})
		second := n.conf(t, "podnet", object{"enableIPv6": true, "nonMasqueradeCIDRs": []string{"172.16.0.0/12", "fd00::/8"}})
		program := n.path
		n.failRuleWrites(t, "ip6tables-restore", "ip6tables-"+n.backend.variant+"-restore")
		n.invoke(t, invocation{verb: "ADD", conf: second}).want(t, 100, "ipv6", "missing kernel module", "xt_addrtype")
		n.addAndCheck(t, first)
		before := n.ruleset(t)
		n.invoke(t, invocation{verb: "ADD", conf: second}).want(t, 100, "ipv6", "missing kernel module")
		wantSame(t, "rules", n.ruleset(t), before)
		n.invoke(t, invocation{verb: "CHECK", conf: first}).want(t, 0)
		n.addAndCheck(t, first).noWarnings(t)
		n.path = n.linkBothVariants(t, n.backend.variant)
		n.addAndCheck(t, second)
		n.path = program
		n.invoke(t, invocation{verb: "ADD", conf: second}).want(t, 0).noWarnings(t)
	})
}

// TestKilledADDs starts 20 concurrent ADDs, five times, with other policies and drift, and kills
// half of them at random points. It checks that the other ADDs succeed, that no rule is duplicated
// or incomplete, and that the next ADD recovers.
func TestKilledADDs(t *testing.T) {
	onEveryBackend(t, func(t *testing.T, n *node) {
		seed := rand.Uint64()
		t.Logf("seed %d", seed)
		random := rand.New(rand.NewPCG(seed, 0))
		n.addThirdPartyRules(t)
		thirdParty := n.thirdPartyRuleset(t, "IP-MASQ-AGENT")
		killed := 0
		for round := range 5 {
			conf := n.conf(t, "podnet", object{"enableIPv6": true, "nonMasqueradeCIDRs": []string{fmt.Sprintf("10.%d.0.0/16", round), "fd00::/8"}})
			if round%2 == 1 {
				n.damage(t)
			}
			killed += n.runAndKillADDs(t, random, conf, 20)
			n.addAndCheck(t, conf)
			if unknown := n.unknownFiles(t); len(unknown) > 0 {
				t.Errorf("unexpected files: %q", unknown)
			}
			n.wantJumps(t, "IP-MASQ-AGENT", 1, 1)
			n.invoke(t, invocation{verb: "ADD", conf: conf}).want(t, 0).noWarnings(t)
		}
		if killed == 0 {
			t.Error("no ADD was killed")
		}
		wantSame(t, "third-party rules", n.thirdPartyRuleset(t, "IP-MASQ-AGENT"), thirdParty)
	})
}

// runAndKillADDs runs count concurrent ADDs and kills half of them. It returns the number of killed
// ADDs.
func (n *node) runAndKillADDs(t *testing.T, random *rand.Rand, conf string, count int) (killed int) {
	t.Helper()
	var all sync.WaitGroup
	dead := make([]bool, count)
	for i := range count {
		c := n.prepare(t, invocation{verb: "ADD", conf: conf, id: fmt.Sprint("pod", i)})
		var out bytes.Buffer
		c.Stdout, c.Stderr = &out, &out
		kill := i%2 == 1
		r := random.Float64()
		after := time.Duration(r * r * r * float64(60*time.Millisecond)) // mostly short, because an ADD takes as little as 2 ms
		all.Go(func() {
			if err := c.Start(); err != nil {
				t.Errorf("ADD: %v", err)
				return
			}
			if kill {
				time.AfterFunc(after, func() { _ = c.Process.Kill() }) // the process may have ended
			}
			err := c.Wait()
			dead[i] = err != nil && kill && c.ProcessState.ExitCode() < 0
			if err != nil && !dead[i] {
				t.Errorf("ADD %d: %v\n%s", i, err, out.Bytes())
			}
		})
	}
	all.Wait()
	for _, isDead := range dead {
		if isDead {
			killed++
		}
	}
	return killed
}

// damage removes some of the owned rules and adds unexpected ones.
func (n *node) damage(t *testing.T) {
	t.Helper()
	n.alter(t, "-D IP-MASQ-AGENT 1\n-A IP-MASQ-AGENT -d 192.0.2.0/24 -j RETURN\n-A POSTROUTING -j IP-MASQ-AGENT",
		"add rule ip ip-masq masq-IP-MASQ-AGENT ip daddr 192.0.2.0/24 return; delete table ip6 ip-masq")
}

// unknownFiles returns the files of the dataDir that a node without failures does not have.
func (n *node) unknownFiles(t *testing.T) (unknown []string) {
	t.Helper()
	hash := func(s string) bool { return len(s) == 64 && strings.Trim(s, "0123456789abcdef") == "" }
	err := filepath.WalkDir(n.dataDir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		name, dir := e.Name(), filepath.Base(filepath.Dir(path))
		known := path == filepath.Join(n.dataDir, "lock") || path == filepath.Join(n.dataDir, "made-by-ip-masq") || path == filepath.Join(n.dataDir, "record.json") ||
			dir == "sources" && hash(strings.TrimSuffix(strings.TrimSuffix(name, ".json"), ".verified")) || hash(dir) && hash(name)
		if !known {
			unknown = append(unknown, path)
		}
		return nil
	})
	must(t, err)
	return unknown
}
