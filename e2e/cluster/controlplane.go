// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"

	"github.com/ip-masq/ip-masq-cni/e2e/machine"
	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

// services is the prefix of ClusterIPs; the first address is the API server's.
func services() netip.Prefix { return netip.MustParsePrefix("10.96.0.0/16") }

// dnsAddress is the ClusterIP of DNS.
func dnsAddress() netip.Addr { return netip.MustParseAddr("10.96.0.10") }

// controlPlane is etcd and the three control plane programs of Kubernetes on one machine.
type controlPlane struct {
	authority *authority
	url       string
	// admin is the kubeconfig of an administrator.
	admin string
}

// startControlPlane starts a control plane on a machine with the address; ranges are the prefixes of
// ClusterIPs. It returns once the API server answers. Files are in directory, programs in binaries.
func startControlPlane(ctx context.Context, m *machine.Machine, address netip.Addr, ranges, directory, binaries string) (*controlPlane, error) {
	a, err := newAuthority(directory)
	if err != nil {
		return nil, err
	}
	c := &controlPlane{authority: a, url: fmt.Sprintf("https://%s", netip.AddrPortFrom(address, 6443))}
	if c.admin, err = a.kubeconfig(c.url, "admin", "system:masters"); err != nil {
		return nil, err
	}
	run := func(program string, args ...string) error {
		_, err := m.StartDaemon(filepath.Base(program), nil, program, args...)
		return err
	}
	// No fsync: the data need not survive a crash.
	if err := run("etcd", "--data-dir", filepath.Join(directory, "etcd"), "--unsafe-no-fsync",
		"--listen-client-urls", "http://127.0.0.1:2379", "--advertise-client-urls", "http://127.0.0.1:2379",
		"--listen-peer-urls", "http://127.0.0.1:2380", "--logger", "zap"); err != nil {
		return nil, err
	}

	serving, err := a.server("kube-apiserver", []string{"kubernetes", "kubernetes.default.svc"}, address, services().Addr().Next())
	if err != nil {
		return nil, err
	}
	toKubelets, err := a.client("apiserver-to-kubelets", "kube-apiserver", "system:masters")
	if err != nil {
		return nil, err
	}
	accounts, err := a.client("service-accounts", "service-accounts")
	if err != nil {
		return nil, err
	}
	if err := run(filepath.Join(binaries, "kube-apiserver"),
		"--etcd-servers=http://127.0.0.1:2379",
		"--advertise-address="+address.String(), "--secure-port=6443",
		"--tls-cert-file="+serving.certificate, "--tls-private-key-file="+serving.key,
		"--client-ca-file="+a.caFile(),
		"--kubelet-client-certificate="+toKubelets.certificate, "--kubelet-client-key="+toKubelets.key,
		"--kubelet-certificate-authority="+a.caFile(),
		"--kubelet-preferred-address-types=InternalIP",
		"--service-account-issuer=https://kubernetes.default.svc",
		"--service-account-key-file="+accounts.certificate, "--service-account-signing-key-file="+accounts.key,
		"--service-cluster-ip-range="+ranges,
		"--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction",
		"--allow-privileged=true", "--profiling=false",
		// Otherwise the API server repeats a request that etcd 3.4 does not support.
		"--feature-gates=SizeBasedListCostEstimate=false"); err != nil {
		return nil, err
	}
	// The other programs end if the API server has not yet created their roles at its start.
	if err := Await(ctx, Patience, func() error {
		if err := running(m); err != nil {
			return err
		}
		_, err := m.Command(ctx, filepath.Join(binaries, "kubectl"), "--kubeconfig="+c.admin, "get", "--raw", "/readyz").Output()
		return err
	}); err != nil {
		return nil, fmt.Errorf("wait for API server: %w", err)
	}
	for user, args := range map[string][]string{
		"kube-controller-manager": {
			"--service-account-private-key-file=" + accounts.key, "--root-ca-file=" + a.caFile(),
			"--use-service-account-credentials=true", "--node-monitor-period=1s", "--node-monitor-grace-period=15s",
		},
		"kube-scheduler": nil,
	} {
		config, err := a.kubeconfig(c.url, "system:"+user)
		if err != nil {
			return nil, err
		}
		args = append(args, "--kubeconfig="+config, "--leader-elect=false",
			"--authentication-kubeconfig="+config, "--authorization-kubeconfig="+config, "--bind-address=127.0.0.1")
		if err := run(filepath.Join(binaries, user), args...); err != nil {
			return nil, err
		}
	}
	return c, nil
}

// Binaries are the directories of programs that are not Debian packages.
type Binaries struct {
	// Own has ip-masq and ip-masq-reconciler, cni with the reference plugins, and deploy with helm.
	Own string
	// Containerd has containerd, its shim and ctr.
	Containerd string
	// Kubernetes has kube-apiserver, kubelet and so on.
	Kubernetes string
	// Flannel has flanneld, install-conf, the CNI plugin flannel and kube-flannel.yml.
	Flannel string
	// Images has the project's container images, ip-masq-TAG.tar.
	Images string
}

// FindBinaries returns the directories that environment variables of `make e2e-cluster` name.
func FindBinaries() (Binaries, error) {
	own, err := topology.BinDir()
	if err != nil {
		return Binaries{}, err
	}
	b := Binaries{
		Own:        own,
		Containerd: os.Getenv("IPMASQ_CONTAINERD_DIR"),
		Kubernetes: os.Getenv("IPMASQ_KUBERNETES_DIR"),
		Flannel:    os.Getenv("IPMASQ_FLANNEL_DIR"),
		Images:     os.Getenv("IPMASQ_IMAGE_DIR"),
	}
	for _, program := range []string{
		filepath.Join(b.Own, "ip-masq"),
		filepath.Join(b.Own, "cni", "bridge"),
		filepath.Join(b.Own, "deploy", "helm"),
		filepath.Join(b.Containerd, "containerd"),
		filepath.Join(b.Kubernetes, "kubelet"),
	} {
		if _, err := os.Stat(program); err != nil {
			return Binaries{}, fmt.Errorf("find binaries: %w (`make e2e-cluster` builds them and sets"+
				" IPMASQ_BIN_DIR, IPMASQ_CONTAINERD_DIR, IPMASQ_KUBERNETES_DIR and IPMASQ_IMAGE_DIR)", err)
		}
	}
	return b, nil
}
