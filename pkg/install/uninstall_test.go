// SPDX-License-Identifier: Apache-2.0

package install

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/ip-masq/ip-masq-cni/pkg/conflist"
)

const results = "/var/lib/cni/results"

// cached is a file of libcni's cache.
func cached(t *testing.T, id, netns, list string) string {
	t.Helper()
	text, err := json.Marshal(map[string]any{
		"kind": "cniCacheV1", "containerId": id, "config": base64.StdEncoding.EncodeToString([]byte(list)), "ifName": "eth0",
		"networkName": "podnet", "netns": netns, "result": map[string]any{"cniVersion": "1.0.0", "dns": map[string]any{}},
	})
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func TestAttached(t *testing.T) {
	with, without := conf("bridge", "ip-masq"), conf("bridge", "ip-masq-of-others")
	root := node(t, map[string]string{
		results + "/podnet-a-eth0":      cached(t, "a", "/run/netns/a", with),
		results + "/podnet-b-eth0":      cached(t, "b", "/run/netns/b", without),
		results + "/podnet-c-eth0":      cached(t, "c", "/run/netns/c", with), // containerd's
		results + "/podnet-old-eth0":    cached(t, "old", "/run/netns/old", with),
		results + "/podnet-older-eth0":  cached(t, "older", "", with),
		results + "/podnet-lives-eth0":  cached(t, "lives", "/run/netns/lives", with),
		results + "/podnet-legacy-eth0": `{"cniVersion": "0.2.0", "ip4": {"ip": "10.0.0.1/24"}}`,
		results + "/torn":               cached(t, "torn", "", with)[:100],
		results + "/text":               "ip-masq",
		results + "/empty":              "",
		results + "/directory/file":     cached(t, "d", "", with),
		"/var/lib/cni/multus/f00":       `[{"Conf": {"type": "sriov"}}, {"ConfList": {"name": "podnet", "plugins": [{"type": "bridge"}, {"type": "ip-masq"}]}}]`,
		"/var/lib/cni/multus/f01":       `[{"Conf": {"type": "sriov"}, "Bytes": "` + base64.StdEncoding.EncodeToString([]byte(without)) + `"}]`,
		"/run/netns/a":                  "", "/run/netns/lives": "",
		"/run/containerd/io.containerd.runtime.v2.task/k8s.io/c/init.pid": "1",
	})
	before := time.Unix(86400, 0)
	for _, name := range []string{"old", "older", "lives"} {
		touch(t, filepath.Join(root, results, "podnet-"+name+"-eth0"), before)
	}
	touch(t, filepath.Join(root, results, "torn"), before)
	touch(t, filepath.Join(root, results, "text"), before)
	touch(t, filepath.Join(root, results, "empty"), before)
	have, err := Attached(root)
	if err != nil {
		t.Fatal(err)
	}
	want := []Attachment{
		{"a", "eth0", "podnet", filepath.Join(root, results, "podnet-a-eth0")},
		{"lives", "eth0", "podnet", filepath.Join(root, results, "podnet-lives-eth0")},
		{"f00", "", "", filepath.Join(root, "/var/lib/cni/multus/f00")},
	}
	if d := cmp.Diff(want, have); d != "" {
		t.Error(d)
	}

	// What is being written may be one.
	touch(t, filepath.Join(root, results, "torn"), time.Now())
	if _, err := Attached(root); err == nil || !strings.Contains(err.Error(), "torn is being written") {
		t.Error(err)
	}
	if have, err := Attached(t.TempDir()); have != nil || err != nil {
		t.Errorf("on a node without caches: %v, %v", have, err)
	}
}

func touch(t *testing.T, path string, at time.Time) {
	t.Helper()
	if err := os.Chtimes(path, at, at); err != nil {
		t.Fatal(err)
	}
}

// life is a node with all that an install brings, and an uninstall of it that
// notes when the state goes.
func life(t *testing.T) (u Uninstall, binary, list string, states *int) {
	t.Helper()
	root := node(t, map[string]string{
		usualConf + "/10-x.conflist": conf("bridge", "ip-masq"), usualConf + "/20-y.conflist": conf("ip-masq", "ptp"),
		usualBin + "/bridge": "", usualBin + "/ip-masq": plugin("v1"),
	})
	binary, list = filepath.Join(root, usualBin, "ip-masq"), filepath.Join(root, usualConf, "10-x.conflist")
	states = new(int)
	u = Uninstall{Dirs: Dirs{filepath.Dir(list), filepath.Dir(binary)}, Root: root, State: func(context.Context) error {
		if _, err := os.Lstat(binary); err == nil {
			t.Error("the state goes while the plugin is there")
		}
		*states++
		return nil
	}}
	return u, binary, list, states
}

func TestUninstall(t *testing.T) {
	u, binary, list, states := life(t)
	write(t, filepath.Join(u.Dirs.Conf, ".ip-masq-7.tmp"), "half", 0o600)
	write(t, filepath.Join(u.Dirs.Bin, ".ip-masq-7.tmp"), "half", 0o600)
	done, err := u.Step(t.Context())
	if err != nil || len(done.Conflists) != 2 || done.Binary != binary || *states != 1 {
		t.Errorf("%+v, %d, %v", done, *states, err)
	}
	if have := content(t, list); have != conf("bridge") {
		t.Error(have)
	}
	only(t, u.Dirs.Conf, "10-x.conflist", "20-y.conflist")
	only(t, u.Dirs.Bin, "bridge")
	was := tree(t, u.Root)
	done, err = u.Step(t.Context())
	if d := cmp.Diff(Uninstalled{}, done); d != "" || err != nil || *states != 2 {
		t.Errorf("once more: %s, %d, %v", d, *states, err)
	}
	if now := tree(t, u.Root); now != was {
		t.Errorf("once more changed:\n%s\nwas:\n%s", now, was)
	}
}

// TestUninstallWaits: as long as a runtime may call the plugin it stays, and the
// state with it; new pods meet it no more.
func TestUninstallWaits(t *testing.T) {
	u, binary, list, states := life(t)
	file := filepath.Join(u.Root, results, "podnet-a-eth0")
	write(t, file, cached(t, "a", "/run/netns/a", conf("bridge", "ip-masq")), 0o600)
	for range 2 {
		done, err := u.Step(t.Context())
		var attached *AttachedError
		if !errors.As(err, &attached) || len(attached.Attached) != 1 || len(done.Attached) != 1 || done.Binary != "" || *states != 0 {
			t.Fatalf("%+v, %d, %v", done, *states, err)
		}
		for _, s := range []string{"container a", file, "--wait", "--no-wait"} {
			if !strings.Contains(err.Error(), s) {
				t.Errorf("does not say %q: %v", s, err)
			}
		}
		if content(t, list) != conf("bridge") || content(t, binary) != plugin("v1") {
			t.Error("the entry is there, or the plugin is not")
		}
	}
	gone(t, file)
	if done, err := u.Step(t.Context()); err != nil || done.Binary != binary || *states != 1 {
		t.Errorf("%+v, %d, %v", done, *states, err)
	}
}

func TestUninstallWithoutWaiting(t *testing.T) {
	u, binary, _, states := life(t)
	u.NoWait = true
	write(t, filepath.Join(u.Root, results, "podnet-a-eth0"), cached(t, "a", "", conf("ip-masq")), 0o600)
	done, err := u.Step(t.Context())
	if err != nil || done.Binary != binary || len(done.Attached) != 1 || *states != 1 {
		t.Errorf("%+v, %d, %v", done, *states, err)
	}
}

// TestUninstallSettles: what an ADD under way leaves in the cache counts.
func TestUninstallSettles(t *testing.T) {
	u, binary, list, states := life(t)
	u.Settle = time.Second
	ended := make(chan error, 1)
	go func() {
		for { // until the entry is gone; then the ADD ends
			text, err := os.ReadFile(list)
			if err != nil || !strings.Contains(string(text), "ip-masq") {
				dir := filepath.Join(u.Root, results)
				ended <- errors.Join(err, os.MkdirAll(dir, 0o700),
					os.WriteFile(filepath.Join(dir, "podnet-a-eth0"), []byte(cached(t, "a", "", conf("ip-masq"))), 0o600))
				return
			}
			time.Sleep(time.Millisecond)
		}
	}()
	done, err := u.Step(t.Context())
	if e := <-ended; e != nil {
		t.Fatal(e)
	}
	var attached *AttachedError
	if !errors.As(err, &attached) || done.Binary != "" || *states != 0 {
		t.Errorf("%+v, %d, %v", done, *states, err)
	}
	if _, err := os.Lstat(binary); err != nil {
		t.Error(err)
	}
}

// TestUninstallStops: while a conflist may name the plugin, it stays.
func TestUninstallStops(t *testing.T) {
	for name, c := range map[string]struct{ file, text, says string }{
		"a broken list":       {"30-z.conflist", `{"plugins": [{"type": "ip-masq"}`, "mend or remove it"},
		"the only plugin":     {"30-z.conflist", conf("ip-masq"), "remove the file"},
		"a lone plugin":       {"30-z.conf", `{"cniVersion": "1.0.0", "name": "z", "type": "ip-masq"}`, "remove the file"},
		"in the folder of it": {"podnet/50-z.conf", `{"type": "ip-masq"}`, "remove its file"},
	} {
		t.Run(name, func(t *testing.T) {
			u, binary, list, states := life(t)
			write(t, filepath.Join(u.Dirs.Conf, c.file), c.text, 0o644)
			done, err := u.Step(t.Context())
			if err == nil || !strings.Contains(err.Error(), c.says) || !strings.Contains(err.Error(), u.Dirs.Conf) {
				t.Errorf("%+v, %v", done, err)
			}
			if content(t, binary) != plugin("v1") || *states != 0 || content(t, list) != conf("bridge") {
				t.Error("the plugin or the state went, or the other conflist has the entry still")
			}
			gone(t, filepath.Join(u.Dirs.Conf, c.file))
			if _, err := u.Step(t.Context()); err != nil || *states != 1 {
				t.Error(err)
			}
		})
	}
}

// TestUninstallLeavesOthers: what bears the plugin's name and was not put there by
// Put stays, and keeps nothing else from going.
func TestUninstallLeavesOthers(t *testing.T) {
	u, binary, _, states := life(t)
	gone(t, binary)
	u.State = func(context.Context) error { *states++; return nil }
	if err := os.Symlink("bridge", binary); err != nil {
		t.Fatal(err)
	}
	done, err := u.Step(t.Context())
	if err == nil || !strings.Contains(err.Error(), "somebody else put it there") || done.Binary != "" || *states != 1 {
		t.Errorf("%+v, %d, %v", done, *states, err)
	}
	if _, err := os.Lstat(binary); err != nil {
		t.Error(err)
	}
}

func TestUninstallOfNothing(t *testing.T) {
	u := Uninstall{Root: t.TempDir()}
	if done, err := u.Step(t.Context()); err != nil || cmp.Diff(Uninstalled{}, done) != "" {
		t.Errorf("%+v, %v", done, err)
	}
	u.Dirs = Dirs{u.Root + "/conf", u.Root + "/bin"}
	if done, err := u.Step(t.Context()); err != nil || cmp.Diff(Uninstalled{}, done) != "" {
		t.Errorf("%+v, %v", done, err)
	}
	only(t, u.Root)
}

func TestInstall(t *testing.T) {
	source, bin := binDir(t)
	list := filepath.Join(t.TempDir(), "net.d", "10-x.conflist")
	i := Install{Dirs: Dirs{filepath.Dir(list), bin}, Plugin: source, Place: &conflist.Place{Entry: []byte(conflist.DefaultEntry)}}

	// Without a network yet the plugin is in place all the same.
	done, err := i.Run(t.Context())
	if !errors.Is(err, conflist.ErrNone) || !done.Binary.Wrote {
		t.Errorf("%+v, %v", done, err)
	}
	write(t, list, conf("bridge"), 0o644)
	i.Place.Admits = func(network string) error { return errors.New("not " + network) }
	if done, err := i.Run(t.Context()); err == nil || !strings.HasSuffix(err.Error(), "not podnet") || done.Conflist.Wrote || content(t, list) != conf("bridge") {
		t.Errorf("%+v, %v", done, err)
	}
	i.Place.Admits = nil
	write(t, source, speaking(allVersions, "another"), 0o755)
	var noBinary *BinaryError
	if _, err := i.Run(t.Context()); !errors.As(err, &noBinary) || content(t, list) != conf("bridge") {
		t.Error(err)
	}
	write(t, source, plugin("v3"), 0o755)
	if done, err := i.Run(t.Context()); err != nil || !done.Conflist.Wrote || done.Binary.Version != "v3" || !strings.Contains(content(t, list), `"ip-masq"`) {
		t.Errorf("%+v, %v", done, err)
	}
	if done, err := i.Run(t.Context()); err != nil || done.Conflist.Wrote || done.Binary.Wrote {
		t.Errorf("%+v, %v", done, err)
	}
}
