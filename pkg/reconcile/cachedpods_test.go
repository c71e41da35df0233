// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"encoding/base64"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// cache writes the runtime's cache.
type cache struct {
	*fixture
	dir, netNS string
}

func newCache(t *testing.T) cache {
	t.Helper()
	c := cache{fixture: newFixture(t)}
	c.dir, c.netNS = filepath.Join(c.fixture.dir, "results"), filepath.Join(c.fixture.dir, "ns")
	must(t, os.Mkdir(c.dir, 0o700))
	must(t, os.Symlink("/proc/self/ns/net", c.netNS)) // a file of nsfs, as a mounted namespace
	c.CacheDir = c.dir
	return c
}

func (c cache) path(network, id string) string { return filepath.Join(c.dir, network+"-"+id+"-eth0") }

// add writes the file of a pod, with the configuration that the runtime had.
func (c cache) add(network, id, namespace, address, config string) {
	c.Helper()
	c.file(c.path(network, id), fmt.Sprintf(`{"kind":"cniCacheV1","containerId":%q,"config":%q,"ifName":"eth0","networkName":%q,"netns":%q,`+
		`"cniArgs":[["K8S_POD_NAMESPACE",%q],["K8S_POD_NAME","web-0"]],"result":{"cniVersion":"1.0.0","ips":[{"address":"%s/16"}]}}`,
		id, base64.StdEncoding.EncodeToString([]byte(config)), network, c.netNS, namespace, address))
}

// holds fails the test unless these are the addresses that are exempt by namespace.
func (c cache) holds(what string, want ...string) {
	c.Helper()
	if r := c.right(); len(r.Rules.Diff()) > 0 {
		c.Errorf("%s: the rules differ: %v", what, r.Rules.Diff())
	}
	s := assert.Must(c.Dir.Load())(c.T)
	var got []string
	for _, p := range s.Record.Pods {
		got = append(got, p.Address.String())
	}
	assert.Equal(c, what+": exempt", fmt.Sprint(got), fmt.Sprint(want))
}

// TestCachedPods: when a pod of the runtime's cache is recorded, and when it is forgotten.
func TestCachedPods(t *testing.T) {
	c := newCache(t)
	keys := map[string]any{"nonMasqueradeNamespaces": []string{"prod"}}
	c.add("podnet", "a", "prod", "10.1.0.5", "{}")
	c.add("podnet", "b", "dev", "10.1.0.6", "{}")
	c.add("othernet", "c", "prod", "10.1.0.7", "{}")
	c.holds("no entry")
	if pods, _, err := c.Dir.Pods(); len(pods) > 0 || err != nil {
		t.Errorf("%+v, %v", pods, err)
	}
	c.conflist("podnet", keys)
	c.holds("an entry", "10.1.0.5")
	events := c.CacheEvents()
	changed := func(what string, want bool) {
		t.Helper()
		assert.Equal(t, what+": a sync is due", events.Concern(), want)
	}
	changed("at first", true)
	changed("nothing changed", false)
	if pods, _, err := c.Dir.Pods(); len(pods) != 2 || err != nil {
		t.Errorf("%+v, %v", pods, err)
	}
	c.add("podnet", "d", "prod", "10.1.0.8", "{}")
	changed("a file appeared", true)
	c.holds("a file appeared", "10.1.0.5", "10.1.0.8")
	must(t, os.Remove(c.path("podnet", "a")))
	changed("a file is gone", true)
	c.holds("a file is gone", "10.1.0.8")
	c.file(c.path("podnet", "half"), "{")
	changed("a file is being written", true)
	c.holds("a file is being written", "10.1.0.8")
	must(t, os.Remove(c.path("podnet", "half")))
	changed("and is gone", true)

	// DEL comes before the runtime removes the file, whatever else happens meanwhile.
	d := store.Attachment{Network: "podnet", ContainerID: "d", IfName: "eth0"}
	must(t, c.Dir.Detach(d))
	c.holds("after its DEL")
	c.conflist("third", map[string]any{"masqChain": "THIRD"})
	c.holds("after its DEL and another entry")
	c.add("podnet", "d", "prod", "10.1.0.9", "{}")
	c.holds("its file was written again", "10.1.0.9")

	// A pod whose network namespace has gone holds no address, even if the runtime leaves its file.
	must(t, os.Rename(c.netNS, c.netNS+".gone"))
	c.holds("without its network namespace")
	must(t, os.Rename(c.netNS+".gone", c.netNS))
	c.holds("which is not recorded again")
	c.add("podnet", "d", "prod", "10.1.0.9", "{}")
	c.holds("its file was written once more", "10.1.0.9")

	// Another reconciler finds the records, and forgets what has gone meanwhile.
	c.cached = &cachedPods{}
	c.CacheDir = c.dir
	c.holds("another reconciler", "10.1.0.9")
	c.cached = &cachedPods{}
	c.CacheDir = c.dir
	must(t, os.Remove(c.path("podnet", "d")))
	c.holds("gone meanwhile")
	changed("another reconciler", true)

	// An attachment that had an ADD is none for the cache.
	e := store.Attachment{Network: "podnet", ContainerID: "e", IfName: "eth0"}
	must(t, c.Dir.Attach(store.Pod{Attachment: e, Namespace: "dev"}))
	c.add("podnet", "e", "prod", "10.1.0.5", "{}")
	changed("an attachment had an ADD", false)
	c.holds("an attachment had an ADD")
	must(t, os.Remove(c.path("podnet", "e")))
	changed("an attachment had an ADD and is gone", false)
}

// TestCachedPodBeforeAKill: one sync exempts a pod that a process recorded which was killed before it wrote the rules.
func TestCachedPodBeforeAKill(t *testing.T) {
	c := newCache(t)
	c.conflist("podnet", map[string]any{"nonMasqueradeNamespaces": []string{"prod"}})
	c.right()
	c.add("podnet", "a", "prod", "10.1.0.5", "{}")
	a := store.Attachment{Network: "podnet", ContainerID: "a", IfName: "eth0"}
	pod := store.Pod{Attachment: a, Namespace: "prod", Addresses: []netip.Addr{netip.MustParseAddr("10.1.0.5")}}
	assert.Must(c.Dir.AttachCached(pod))(t)
	c.cached = &cachedPods{}
	c.sync()
	s := assert.Must(c.Dir.Load())(t)
	assert.Equal(t, "exempt pods", len(s.Record.Pods), 1)
}

// TestCachedPodIsForgottenLater: what could not be removed, or not be read at first, is forgotten by a later
// sync, and each sync that fails warns.
func TestCachedPodIsForgottenLater(t *testing.T) {
	c := newCache(t)
	c.conflist("podnet", map[string]any{"nonMasqueradeNamespaces": []string{"prod"}})
	warns := func(want string) {
		t.Helper()
		assert.ErrorContains(t, errors.Join(c.sync().Warnings...), want)
	}
	c.add("podnet", "a", "prod", "10.1.0.5", "{}")
	c.holds("at first", "10.1.0.5")
	records := assert.Must(filepath.Glob(filepath.Join(c.Dir.Path(), "*", c.Dir.Boot(), "*", "*.cached")))(t)
	assert.Equal(t, "records", len(records), 1)
	record := records[0]
	must(t, os.Rename(record, record+".away"))
	must(t, os.Mkdir(record, 0o700)) // which is not removed as a file
	must(t, os.Remove(c.path("podnet", "a")))
	warns("remove")
	c.add("podnet", "b", "prod", "10.1.0.6", "{}") // the sync records it, and so makes another report
	warns("remove")
	must(t, os.Remove(record))
	must(t, os.Rename(record+".away", record))
	c.holds("it can be removed", "10.1.0.6")

	c.cached = &cachedPods{}
	network := filepath.Dir(record)
	must(t, os.Remove(c.path("podnet", "b")))
	must(t, os.Chmod(network, 0o777)) // which nobody reads
	warns(network)
	must(t, os.Chmod(network, 0o700))
	c.holds("it can read them")
}

// TestWarningOfEntries: a sync that writes warns of a digest that it could not record before.
func TestWarningOfEntries(t *testing.T) {
	f := newFixture(t)
	f.pluginFile("")
	f.conflist("podnet", map[string]any{"nonMasqueradeCIDRs": []string{"10.1.0.0/16"}})
	f.right()
	f.right() // which records the entry
	digests := assert.Must(filepath.Glob(filepath.Join(f.Dir.Path(), "*", f.Dir.Boot(), "*.entries")))(t)
	assert.Equal(t, "files of digests", len(digests), 1)
	must(t, os.Remove(digests[0]))
	must(t, os.Mkdir(digests[0], 0o700))
	f.conflist("podnet", map[string]any{"nonMasqueradeCIDRs": []string{"10.2.0.0/16"}})
	r := f.sync()
	f.wants(r, Changed)
	assert.ErrorContains(t, errors.Join(r.Warnings...), "digests of plugin entries")
}

// TestCachedPodTakesNoAddress: a pod of the cache takes an address only from an older one of the cache.
func TestCachedPodTakesNoAddress(t *testing.T) {
	c := newCache(t)
	c.conflist("podnet", map[string]any{"nonMasqueradeNamespaces": []string{"prod"}})
	c.right()
	age := func(id string, age time.Duration) {
		t.Helper()
		at := time.Now().Add(-age)
		must(t, os.Chtimes(c.path("podnet", id), at, at))
	}
	c.add("podnet", "old", "prod", "10.1.0.5", "{}")
	age("old", 2*time.Minute)
	c.holds("the first", "10.1.0.5")
	c.add("podnet", "older", "dev", "10.1.0.5", "{}")
	age("older", 3*time.Minute)
	c.holds("an older one", "10.1.0.5")
	c.add("podnet", "newer", "dev", "10.1.0.5", "{}")
	age("newer", time.Minute)
	c.holds("a newer one")
	must(t, os.Remove(c.path("podnet", "newer")))
	c.holds("what was taken is not given back")

	added := store.Pod{Attachment: store.Attachment{Network: "podnet", ContainerID: "added", IfName: "eth0"}, Namespace: "dev"}
	added.Addresses = append(added.Addresses, netip.MustParseAddr("10.1.0.6"))
	must(t, c.Dir.Attach(added))
	c.add("podnet", "last", "prod", "10.1.0.6", "{}")
	age("last", -time.Second)
	c.holds("beside an ADD")
	c.conflist("podnet", map[string]any{"nonMasqueradeNamespaces": []string{"prod", "other"}})
	c.holds("beside an ADD, with another list")
}

// TestCachedPodsWithPluginFile: with a plugin.toml the runtime must have had the conflist of now.
func TestCachedPodsWithPluginFile(t *testing.T) {
	c := newCache(t)
	c.conflist("podnet", map[string]any{"nonMasqueradeNamespaces": []string{"prod"}})
	c.pluginFile("")
	c.add("podnet", "same", "prod", "10.1.0.5", `{"name": "podnet", "plugins": [{"type": "ptp"}], "cniVersion": "1.0.0"}`)
	c.add("podnet", "other", "prod", "10.1.0.6", `{"name": "podnet", "plugins": [{"type": "static"}], "cniVersion": "1.0.0"}`)
	c.holds("with plugin.toml", "10.1.0.5")
}

// TestWallClock: a step of the wall clock forward makes each file look older than the boot, and changes no
// record.
func TestWallClock(t *testing.T) {
	c := newCache(t)
	c.conflist("podnet", map[string]any{"nonMasqueradeNamespaces": []string{"prod"}})
	c.add("podnet", "a", "prod", "10.1.0.5", "{}")
	c.holds("at first", "10.1.0.5")
	step := func(id string, d time.Duration) {
		t.Helper()
		at := assert.Must(os.Stat(c.path("podnet", id)))(t).ModTime().Add(d)
		must(t, os.Chtimes(c.path("podnet", id), at, at))
	}
	const years = 20 * 365 * 24 * time.Hour
	step("a", -years)
	c.holds("after a step forward", "10.1.0.5")
	c.cached = &cachedPods{}
	c.holds("after a step forward and a new reconciler", "10.1.0.5")
	c.add("podnet", "b", "prod", "10.1.0.6", "{}")
	step("b", -years)
	c.holds("another pod after a step forward", "10.1.0.5", "10.1.0.6")
	step("a", 2*years)
	c.holds("after a step back", "10.1.0.5", "10.1.0.6")
}

// TestUnreadableCache: what cannot be read is not gone. A record stays, and a pod without one is reported
// with the reason.
func TestUnreadableCache(t *testing.T) {
	c := newCache(t)
	c.conflist("podnet", map[string]any{"nonMasqueradeNamespaces": []string{"prod"}})
	unrecorded := func(what string, want ...string) {
		t.Helper()
		r := c.sync()
		assert.Equal(t, what+": pods without a record", DescribeUnrecorded(r.Unrecorded), want)
		c.cached = &cachedPods{}
		assert.Equal(t, what+": a command's", DescribeUnrecorded(c.UnrecordedPods(c.Check(t.Context()))), want)
	}
	const byMode = "users other than root may write its file in the runtime's cache (mode 0664)"
	c.add("podnet", "a", "prod", "10.1.0.5", "{}")
	c.holds("at first", "10.1.0.5")
	must(t, os.Chmod(c.path("podnet", "a"), 0o664))
	c.holds("a file that others may write", "10.1.0.5")
	unrecorded("it is on record")

	must(t, os.Chmod(c.path("podnet", "a"), 0o600))
	must(t, os.Rename(c.dir, c.dir+".away"))
	c.holds("a cache that is not mounted", "10.1.0.5")
	must(t, os.Rename(c.dir+".away", c.dir))

	c.add("podnet", "b", "prod", "10.1.0.6", "{}")
	must(t, os.Chmod(c.path("podnet", "b"), 0o664))
	unrecorded("a new file that others may write", "1 pod of the runtime's cache: "+byMode+" (such as podnet-b-eth0)")
	must(t, os.Chmod(c.path("podnet", "b"), 0o600))
	c.holds("it can be read", "10.1.0.5", "10.1.0.6")
	unrecorded("it can be read")

	netNS := c.netNS
	c.netNS = "/proc/self/ns/net"
	c.add("podnet", "d", "prod", "10.1.0.7", "{}")
	c.add("podnet", "e", "prod", "10.1.0.8", "{}")
	c.netNS = filepath.Join(c.fixture.dir, "missing", "ns")
	c.add("podnet", "f", "prod", "10.1.0.9", "{}")
	c.add("othernet", "g", "prod", "10.1.0.9", "{}")
	c.netNS = netNS
	unrecorded("namespaces that cannot be read",
		"1 pod of the runtime's cache: the directory of its network namespace, \""+filepath.Dir(netNS)+"/missing\", does not exist here; "+
			"in a container, mount it (such as podnet-f-eth0)",
		"2 pods of the runtime's cache: the runtime names its network namespace by a process (/proc/PID/ns/net), and another process may "+
			"have that number now (such as podnet-d-eth0)")

	// Pods that had an ADD have a record. After its DEL the runtime removes the file.
	for _, id := range []string{"d", "e", "f"} {
		must(t, c.Dir.Attach(store.Pod{Attachment: store.Attachment{Network: "podnet", ContainerID: id, IfName: "eth0"}}))
	}
	r := c.sync()
	assert.Equal(t, "pods that had an ADD", len(r.Unrecorded), 0)
	for _, id := range []string{"d", "e", "f"} {
		must(t, c.Dir.Detach(store.Attachment{Network: "podnet", ContainerID: id, IfName: "eth0"}))
	}
	r = c.sync()
	assert.Equal(t, "after their DELs", len(r.Unrecorded), 0)
}

// TestCachedFileIsReadOnce: of a file that was read, a sync looks at nothing but its network namespace until it
// is written again.
func TestCachedFileIsReadOnce(t *testing.T) {
	c := newCache(t)
	c.conflist("podnet", map[string]any{"nonMasqueradeNamespaces": []string{"prod"}})
	written := time.Now().Add(-time.Minute)
	write := func(id, address, netNS string) {
		t.Helper()
		there := c.netNS
		c.netNS = netNS
		c.add("podnet", id, "prod", address, "{}")
		c.netNS = there
		must(t, os.Chtimes(c.path("podnet", id), written, written))
	}
	gone := c.netNS + ".gone"
	write("a", "10.1.0.5", c.netNS)
	write("b", "10.1.0.6", gone)
	c.holds("a pod, and one that has gone", "10.1.0.5")
	write("a", "10.1.0.5", gone)
	write("b", "10.1.0.6", c.netNS)
	c.holds("other files with the same times", "10.1.0.5")
	must(t, os.Symlink("/proc/self/ns/net", gone))
	c.holds("the network namespace of the second one is there", "10.1.0.5", "10.1.0.6")
	must(t, os.Remove(gone))
	must(t, os.Chtimes(c.path("podnet", "a"), time.Time{}, time.Now()))
	c.holds("the first file was written again", "10.1.0.6")
}

// TestRepairReadsNoCache: a sync that is made because rules changed does not read the runtime's cache, and one
// that reads the files does.
func TestRepairReadsNoCache(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCache(t)
		c.conflist("podnet", map[string]any{"nonMasqueradeNamespaces": []string{"prod"}})
		c.add("podnet", "a", "prod", "10.1.0.5", "{}")
		netNS := c.netNS
		c.netNS = "/proc/self/ns/net"
		c.add("podnet", "unreadable", "prod", "10.1.0.9", "{}")
		c.netNS = netNS
		exempt := func(r *Report) int { return len(r.State.Record.Pods) }
		l := c.run(func(*Loop) {})
		l.until("pod", func(all []*Report) bool { return len(all) > 0 && exempt(last(all)) == 1 })
		time.Sleep(time.Second)
		c.add("podnet", "b", "prod", "10.1.0.6", "{}")
		c.nft("flush", "chain", "ip", "ip-masq", "masq-IP-MASQ-AGENT")
		l.rulesChanged(Writer{})
		l.until("repair", func(all []*Report) bool { return last(all).Result == Repaired })
		l.until("report", func(all []*Report) bool {
			assert.Equal(t, "exempt after the repair", exempt(last(all)), 1)
			assert.Equal(t, "pods without a record after the repair", len(last(all).Unrecorded), 1)
			return true
		})
		l.FilesChanged()
		l.until("second pod", func(all []*Report) bool { return exempt(last(all)) == 2 })
	})
}
