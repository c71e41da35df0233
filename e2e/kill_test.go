// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

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
		if d := cmp.Diff(thirdParty, n.thirdPartyRuleset(t, "IP-MASQ-AGENT")); d != "" {
			t.Errorf("third-party rules changed:\n%s", d)
		}
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
