// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"encoding/base64"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
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
	must(t, os.Symlink("/proc/self/ns/net", c.netNS))
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
	cacheChanged := c.CacheChanges()
	changed := func(what string, want bool) {
		t.Helper()
		assert.Equal(t, what+": a sync is due", cacheChanged(), want)
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
	changed("a file is being written", false)

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
