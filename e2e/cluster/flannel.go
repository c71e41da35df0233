// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/ip-masq/ip-masq-cni/deploy/image/oci"
	"github.com/ip-masq/ip-masq-cni/e2e/assert"
)

// FlannelConflist is the path of flannel's conflist.
const FlannelConflist = "/etc/cni/net.d/10-flannel.conflist"

// Flannel is flannel as its own manifest deploys it, with an older CNI plugin.
type Flannel struct {
	cluster  *Cluster
	manifest string
}

// NewFlannel gives each node the images of flannel's manifest and its prefix of pods, which flanneld
// reads from the API server.
func (c *Cluster) NewFlannel(t T) *Flannel {
	t.Helper()
	manifest, err := os.ReadFile(filepath.Join(c.options.Binaries.Flannel, "kube-flannel.yml"))
	if err != nil {
		t.Fatalf("read manifest of flannel: %v (`make e2e-cluster` builds flannel and sets IPMASQ_FLANNEL_DIR)", err)
	}
	f := &Flannel{cluster: c, manifest: string(manifest)}
	archives := f.images(t)
	for _, n := range c.Nodes {
		for _, archive := range archives {
			assert.NoError(t, n.Runtime.Import(t.Context(), archive))
		}
		// As kube-controller-manager does with --allocate-node-cidrs.
		assert.NoError(t, Await(t.Context(), Patience, func() error {
			_, err := c.Kubectl(t.Context(), "patch", "node", n.Name, "-p", fmt.Sprintf(`{"spec": {"podCIDR": %q, "podCIDRs": [%q]}}`, n.Pods, n.Pods))
			return err
		}))
	}
	return f
}

// Apply applies flannel's manifest with changes, pairs of a text and its replacement, and replaces
// its pods on all nodes at once: install-conf runs again, then flanneld.
func (f *Flannel) Apply(ctx context.Context, changes ...string) error {
	text := f.manifest
	for i := 0; i < len(changes); i += 2 {
		if strings.Count(text, changes[i]) != 1 {
			return fmt.Errorf("flannel's manifest has not one %q", changes[i])
		}
		text = strings.Replace(text, changes[i], changes[i+1], 1)
	}
	if err := f.cluster.Apply(ctx, text); err != nil {
		return err
	}
	return f.Restart(ctx)
}

// Restart replaces flannel's pods on all nodes and waits until flanneld is ready there.
func (f *Flannel) Restart(ctx context.Context) error {
	if _, err := f.cluster.Kubectl(ctx, "delete", "pod", "-n", "kube-flannel", "-l", "app=flannel", "--timeout="+Patience.String()); err != nil {
		return err
	}
	for _, n := range f.cluster.Nodes {
		if err := Await(ctx, Patience, func() error {
			status, text, err := n.http(ctx, "http://127.0.0.1:8081/readyz")
			if err == nil && status != http.StatusOK {
				err = fmt.Errorf("flanneld on %s: %d %s", n.Name, status, text)
			}
			return err
		}); err != nil {
			logs, _ := f.cluster.Kubectl(ctx, "logs", "-n", "kube-flannel", "-l", "app=flannel", "--all-containers", "--prefix", "--ignore-errors")
			return fmt.Errorf("%w\n%s", err, logs)
		}
	}
	return nil
}

// Conflist returns the conflist that flannel writes.
func (f *Flannel) Conflist(ctx context.Context) (string, error) {
	var config struct{ Data map[string]string }
	err := f.cluster.Get(ctx, &config, "configmap", "-n", "kube-flannel", "kube-flannel-cfg")
	return config.Data["cni-conf.json"], err
}

// images returns the archives of the manifest's images.
func (f *Flannel) images(t T) [][]byte {
	names := map[string]string{}
	for _, image := range regexp.MustCompile(`image: (.*/(.*):.*)`).FindAllStringSubmatch(f.manifest, -1) {
		names[image[2]] = image[1]
	}
	directory := f.cluster.options.Binaries.Flannel
	var archives [][]byte
	for _, image := range []struct {
		name, path string
		programs   map[string]string // by their path in the image
		links      map[string]string
	}{
		{"flannel-cni-plugin", "/bin", map[string]string{"flannel": filepath.Join(directory, "flannel"), "bin/busybox": "/bin/busybox"}, map[string]string{"bin/cp": "busybox"}},
		{"flannel", "/usr/sbin", map[string]string{
			"opt/bin/flanneld":           filepath.Join(directory, "flanneld"),
			"opt/bin/install-conf":       filepath.Join(directory, "install-conf"),
			"usr/sbin/xtables-nft-multi": "/usr/sbin/xtables-nft-multi",
			"usr/sbin/nft":               "/usr/sbin/nft",
		}, iptablesLinks()},
	} {
		files := programFiles(t, image.programs)
		for name, to := range image.links {
			files = append(files, oci.File{Name: name, Mode: 0o777 | fs.ModeSymlink, Link: to})
		}
		archives = append(archives, pack(t, oci.Image{Name: names[image.name], Layers: [][]oci.File{files}, Env: []string{"PATH=" + image.path}}))
	}
	return archives
}

func iptablesLinks() map[string]string {
	links := map[string]string{}
	for _, family := range []string{"iptables", "ip6tables"} {
		for _, suffix := range []string{"", "-save", "-restore"} {
			links["usr/sbin/"+family+suffix] = "xtables-nft-multi"
		}
	}
	return links
}

// programFiles returns programs of this machine as files of an image, with the libraries of
// dynamically linked ones and the extensions of iptables, which has no static program.
func programFiles(t T, programs map[string]string) []oci.File {
	paths := map[string]string{}
	for name, path := range programs {
		paths[name] = path
		output, err := exec.CommandContext(t.Context(), "ldd", path).CombinedOutput()
		if !strings.Contains(string(output), "not a dynamic executable") {
			assert.NoError(t, err)
		}
		for _, library := range regexp.MustCompile(`(/\S+) \(0x`).FindAllStringSubmatch(string(output), -1) {
			paths[library[1]] = library[1]
		}
	}
	for _, path := range assert.Must(filepath.Glob("/usr/lib/*/xtables/*.so"))(t) {
		paths[path] = path
	}
	var files []oci.File
	for name, path := range paths {
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatalf("%v (the Debian packages busybox-static, iptables and nftables have these programs)", err)
		}
		files = append(files, oci.File{Name: name, Mode: 0o755, Data: data})
	}
	return files
}
