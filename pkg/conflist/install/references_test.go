// SPDX-License-Identifier: Apache-2.0

package install

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/timelimit"
)

// cached is a file of libcni's cache.
func cached(t *testing.T, id, netns, list string) string {
	t.Helper()
	text := assert.Must(json.Marshal(map[string]any{
		"kind": "cniCacheV1", "containerId": id, "config": base64.StdEncoding.EncodeToString([]byte(list)), "ifName": "eth0",
		"networkName": "podnet", "netns": netns, "result": map[string]any{"cniVersion": "1.0.0", "dns": map[string]any{}},
	}))(t)
	return string(text)
}

func TestAttachments(t *testing.T) {
	with, without := conf("bridge", "ip-masq"), conf("bridge", "ip-masq-of-others")
	root := node(t, map[string]string{
		libcniCache + "/podnet-a-eth0":      cached(t, "a", "/run/netns/a", with),
		libcniCache + "/podnet-b-eth0":      cached(t, "b", "/run/netns/b", without),
		libcniCache + "/podnet-c-eth0":      cached(t, "c", "/run/netns/c", with), // containerd's
		libcniCache + "/podnet-old-eth0":    cached(t, "old", "/run/netns/old", with),
		libcniCache + "/podnet-older-eth0":  cached(t, "older", "", with),
		libcniCache + "/podnet-lives-eth0":  cached(t, "lives", "/run/netns/lives", with),
		libcniCache + "/podnet-legacy-eth0": `{"cniVersion": "0.2.0", "ip4": {"ip": "10.0.0.1/24"}}`,
		libcniCache + "/torn":               cached(t, "torn", "", with)[:100],
		libcniCache + "/text":               "ip-masq",
		libcniCache + "/empty":              "",
		libcniCache + "/directory/file":     cached(t, "d", "", with),
		"/var/lib/cni/multus/f00":           `[{"Conf": {"type": "sriov"}}, {"ConfList": {"name": "podnet", "plugins": [{"type": "bridge"}, {"type": "ip-masq"}]}}]`,
		"/var/lib/cni/multus/f01":           `[{"Conf": {"type": "sriov"}, "Bytes": "` + base64.StdEncoding.EncodeToString([]byte(without)) + `"}]`,
		"/run/netns/a":                      "", "/run/netns/lives": "",
		"/run/containerd/io.containerd.runtime.v2.task/k8s.io/c/init.pid": "1",
	})
	before := time.Unix(86400, 0)
	for _, name := range []string{"old", "older", "lives"} {
		assert.NoError(t, os.Chtimes(filepath.Join(root, libcniCache, "podnet-"+name+"-eth0"), before, before))
	}
	have := assert.Must(cachedResults(root))(t)
	want := []CachedResult{
		{"a", "eth0", "podnet", filepath.Join(root, libcniCache, "podnet-a-eth0")},
		{"lives", "eth0", "podnet", filepath.Join(root, libcniCache, "podnet-lives-eth0")},
		{"f00", "", "", filepath.Join(root, "/var/lib/cni/multus/f00")},
	}
	assert.Equal(t, "have", have, want)

	if have, err := cachedResults(t.TempDir()); have != nil || err != nil {
		t.Errorf("on a node without caches: %v, %v", have, err)
	}
}

// inMultus is what a delegate becomes in so many configurations of Multus.
func inMultus(delegate string, depth int) string {
	return strings.Repeat(`{"name": "m", "type": "multus", "delegates": [`, depth) + delegate + strings.Repeat(`]}`, depth)
}

func inBase64(text string, layers int) string {
	for range layers {
		text = `{"Bytes": "` + base64.StdEncoding.EncodeToString([]byte(text)) + `"}`
	}
	return text
}

// TestReferences has what names the plugin, and what does not or cannot be read by any
// runtime. Hostile files cost little.
func TestReferences(t *testing.T) {
	with, without := conf("bridge", "ip-masq"), conf("bridge")
	root := node(t, map[string]string{
		"/c/00-multus.conf": inMultus(with, 1), "/c/01-list.conflist": `{"name": "m", "plugins": [` + inMultus(with, 69) + `]}`,
		"/c/02-deep.conf": inMultus(with, 1600), "/c/03-base64.json": inBase64(with, 4),
		"/c/10-x.conflist.cilium_bak": with, "/c/chain/1.conf": `{"type": "ip-masq"}`, "/c/a/b/c/d/1.conf": with,
		"/c/20-y.conflist": without, "/c/21-value.conf": `{"type": "bridge", "name": "ip-masq"}`, "/c/text": "ip-masq", "/c/half.conf": with[:len(with)-9],
		"/c/too-deep.conf": inMultus(with, 20000), "/c/layers.conf": inBase64(with, 5), "/c/a/b/c/d/e/1.conf": with,
		"/etc/cni/multus/net.d/storage.conf": with,
	})
	dir := filepath.Join(root, "c")
	fifo(t, filepath.Join(dir, "fifo.conf"))
	socket := assert.Must(net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(dir, "s.conf"), Net: "unix"}))(t)
	defer func() { _ = socket.Close() }()
	for to, link := range map[string]string{"/nowhere": "nowhere.conf", dir: "loop", filepath.Join(dir, "20-y.conflist"): "y.conflist"} {
		assert.NoError(t, os.Symlink(to, filepath.Join(dir, link)))
	}
	start := time.Now()
	have := assert.Must(references([]string{dir, filepath.Join(root, multusDir), filepath.Join(root, "none")}))(t)
	in := func(name string) string { return filepath.Join(dir, name) }
	want := []string{
		in("00-multus.conf"), in("01-list.conflist"), in("02-deep.conf"), in("03-base64.json"),
		in("a/b/c/d/1.conf"), in("chain/1.conf"), filepath.Join(root, multusDir, "storage.conf"),
	}
	assert.Equal(t, "have", have, want)
	if took := time.Since(start); timelimit.Exceeded(took, 10*time.Second) {
		t.Errorf("it took %v", took)
	}

	// What cannot be read whole may name the plugin.
	write(t, in("large.conf"), `{"x": "`+strings.Repeat("x", 9<<20)+`"}`, 0o644)
	_, err := references([]string{dir})
	assert.ErrorContains(t, err, "large.conf")
}

// TestUninstallOfAMissingPlugin: nothing waits for a DEL that fails anyway.
func TestUninstallOfAMissingPlugin(t *testing.T) {
	u, binary, _, states := life(t)
	gone(t, binary)
	u.RemoveState = func(context.Context) error { *states++; return nil }
	cache, copied := filepath.Join(u.Root, libcniCache, "podnet-a-eth0"), filepath.Join(u.Conf[0], "00-multus.conf")
	write(t, cache, cached(t, "a", "/run/netns/a", conf("bridge", "ip-masq")), 0o600)
	write(t, copied, inMultus(conf("bridge", "ip-masq"), 1), 0o600)
	_, err := u.Step(t.Context())
	assert.ErrorContains(t, err, copied, "restart Multus")
	write(t, copied, inMultus(conf("bridge"), 1), 0o600)
	done, err := u.Step(t.Context())
	if err != nil || len(done.Attached) != 1 || *states != 1 {
		t.Errorf("%+v, %d, %v", done, *states, err)
	}
}
